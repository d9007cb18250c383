"""A speculative pair as a model of LiteLLM: text as it is verified, then what became of the drafts."""

import litellm

from llm_spec.integrations.litellm import register


def main() -> None:
    messages = [{"role": "user", "content": "def test_spawnl(self):"}]
    with register(model="fast", target="builtin:target", draft="lookup+builtin:draft"):
        told = {}
        for chunk in litellm.completion(model="llm_spec/fast", messages=messages, max_tokens=64, stream=True):
            delta = chunk.choices[0].delta
            print(delta.content or "", end="", flush=True)
            told |= delta.provider_specific_fields or {}  # in the last piece
    figures = told["llm_spec"]
    print(f"\n{figures['acceptance_rate']:.0%} of the drafted tokens accepted ({figures['guarantee']})")


if __name__ == "__main__":
    main()
