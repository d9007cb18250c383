"""Where drafts come from: a provider, prompt lookup, suffixes, a given text."""
