"""The recipe of the demo model: corpus, tokenizer, model, training, export. `train_demo.py` runs it."""
