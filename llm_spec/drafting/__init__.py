"""The sources of drafts: a provider, prompt lookup, suffixes, a given text."""
