"""The recipe of the demo model: corpus, tokenizer, model, training and export.
`recipes/train_demo.py` runs all of it."""
