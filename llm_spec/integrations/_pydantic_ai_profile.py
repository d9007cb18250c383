"""Builds a target's profile: what pydantic-ai may expect of it. Pure."""

from __future__ import annotations

from typing import Any, Final

from pydantic_ai.profiles import DEFAULT_PROFILE, ModelProfile, merge_profile
from pydantic_ai.profiles.anthropic import anthropic_model_profile
from pydantic_ai.profiles.openai import OpenAIJsonSchemaTransformer, openai_model_profile

from llm_spec.contract.provider import Capabilities
from llm_spec.integrations._pydantic_ai_files import is_text_media_type
from llm_spec.integrations._pydantic_ai_names import Target

__all__ = ["build_profile"]

_OPENAI_PROVIDERS: Final = ("azure", "openai")
_TEXT_DOCUMENTS: Final = frozenset(
    kind for kind in DEFAULT_PROFILE.get("supported_document_media_types", ()) if is_text_media_type(kind)
)


class _WhereRequestedTransformer(OpenAIJsonSchemaTransformer):
    """Makes a schema strict only if that was requested.

    Models in this process enforce strict schemas, so no schema becomes strict by itself.
    """

    def walk(self) -> dict[str, Any]:
        if self.strict:
            return super().walk()
        self.is_strict_compatible = False
        return self.schema


def build_profile(target: Target, capabilities: Capabilities) -> ModelProfile:
    """Build the profile of a target.

    The target's capabilities override what pydantic-ai knows of a vendor's model. It is not known
    if models of other servers reason, so the `thinking` setting is passed on to them. Later system
    texts are sent unchanged: each provider has its own rule for them.
    """
    is_local, is_anthropic = target.is_local, target.provider == "anthropic"
    profile = ModelProfile(
        supports_tools=capabilities.tools,
        supports_json_schema_output=capabilities.response_format,
        supports_json_object_output=capabilities.response_format and not is_anthropic,
        supports_image_output=False,
        supports_inline_system_prompts=True,
        supports_cache=False,
        json_schema_transformer=_WhereRequestedTransformer if is_local or is_anthropic else OpenAIJsonSchemaTransformer,
    )
    if not capabilities.tools:
        profile["default_structured_output_mode"] = "native" if capabilities.response_format else "prompted"
    if capabilities.context_length is not None:
        profile["context_window"] = capabilities.context_length
    if is_local:
        profile["supports_image_input"] = profile["supports_audio_file_input"] = False
        profile["supported_document_media_types"] = _TEXT_DOCUMENTS
    return merge_profile(_find_vendor_profile(target), profile)


def _find_vendor_profile(target: Target) -> ModelProfile:
    if target.provider in _OPENAI_PROVIDERS:
        return openai_model_profile(target.model)
    if target.provider == "anthropic":
        return anthropic_model_profile(target.model) or ModelProfile()
    return ModelProfile(supports_thinking=True)
