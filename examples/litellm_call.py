"""A speculative pair as a model of LiteLLM: text as it is verified, then what became of the drafts."""

import litellm

from llm_spec.integrations.litellm import register


def main() -> None:
    messages = [{"role": "user", "content": "def test_spawnl(self):"}]
    with register(model="fast", target="builtin:target", draft="lookup+builtin:draft"):
        chunks = []
        for chunk in litellm.completion(model="llm_spec/fast", messages=messages, max_tokens=64, stream=True):
            chunks.append(chunk)
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    answer = litellm.stream_chunk_builder(chunks)
    figures = answer.choices[0].message.provider_specific_fields["llm_spec"]
    print(f"\n{figures['acceptance_rate']:.0%} of the drafted tokens accepted ({figures['guarantee']})")


if __name__ == "__main__":
    main()
