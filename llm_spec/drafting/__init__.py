"""Where drafts come from: a provider, prompt lookup, suffixes, a given text."""

from llm_spec.drafting.cascade import CascadeDraft
from llm_spec.drafting.lookup import PromptLookup
from llm_spec.drafting.provider_draft import ProviderDraft
from llm_spec.drafting.reference import ReferenceDraft
from llm_spec.drafting.suffix import SuffixDraft

__all__ = ["CascadeDraft", "PromptLookup", "ProviderDraft", "ReferenceDraft", "SuffixDraft"]
