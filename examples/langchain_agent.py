"""A speculative pair as a LangChain chat model: text as it is verified, then what became of the drafts.

Needs: pip install 'llm-spec[langchain,onnx]'
"""

try:
    from llm_spec.integrations.langchain import SpeculativeChatModel
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; run: pip install 'llm-spec[langchain,onnx]'") from error


def main() -> None:
    with SpeculativeChatModel(target="builtin:target", draft="lookup+builtin:draft", max_tokens=64) as model:
        answer = None
        for chunk in model.stream("def getregentry():"):
            print(chunk.text, end="", flush=True)
            answer = chunk if answer is None else answer + chunk
        assert answer is not None
        figures = answer.response_metadata["llm_spec"]
        accepted = f"{figures['accepted_tokens']} of {figures['draft_tokens']} drafted tokens accepted"
        print(f"\n{accepted} ({figures['guarantee']})")


if __name__ == "__main__":
    main()
