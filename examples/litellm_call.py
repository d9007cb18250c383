"""A speculative pair as a model of LiteLLM: text as it is verified, then what became of the drafts.

Needs: pip install 'llm-spec[litellm,onnx]'
"""

try:
    import litellm

    from llm_spec.integrations.litellm import register
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; run: pip install 'llm-spec[litellm,onnx]'") from error


def main() -> None:
    messages = [{"role": "user", "content": "def getregentry():"}]
    with register(model="fast", target="builtin:target", draft="lookup+builtin:draft"):
        told = {}
        for chunk in litellm.completion(model="llm_spec/fast", messages=messages, max_tokens=64, stream=True):
            delta = chunk.choices[0].delta
            print(delta.content or "", end="", flush=True)
            told |= delta.provider_specific_fields or {}  # in the last piece
    figures = told["llm_spec"]
    accepted = f"{figures['accepted_tokens']} of {figures['draft_tokens']} drafted tokens accepted"
    print(f"\n{accepted} ({figures['guarantee']})")


if __name__ == "__main__":
    main()
