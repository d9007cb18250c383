"""A model folder in Hugging Face's layout: its files, tokenizer and chat template. For providers of local models.

`tokenizer` needs the packages tokenizers and jinja2, so it is imported where it is used.
"""
