"""How the demo model is made: corpus, tokenizer, model, training, export. `train_demo.py` drives it."""
