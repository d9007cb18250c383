"""A model folder in Hugging Face's layout: its files, tokenizer and chat template. For providers of local models.

`FolderTokenizer` needs the packages tokenizers and jinja2.
"""
