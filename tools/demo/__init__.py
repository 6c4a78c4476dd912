"""How the demo model is made: corpus, tokenizer, model, training, export. `tools/train_demo.py` drives it."""
