"""Where drafts come from: a provider, prompt lookup, suffixes, a given text."""

from llm_spec.drafting.given import GivenText
from llm_spec.drafting.joined import JoinedDraft
from llm_spec.drafting.lookup import PromptLookup
from llm_spec.drafting.model import ProviderDraft
from llm_spec.drafting.suffix import SuffixDraft

__all__ = ["GivenText", "JoinedDraft", "PromptLookup", "ProviderDraft", "SuffixDraft"]
