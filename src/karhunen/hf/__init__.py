"""The part that knows transformers. Importing it changes nothing there; `hf.attention.register` says what does."""
