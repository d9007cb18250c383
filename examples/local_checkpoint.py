"""Hugging Face checkpoints in this process: three drafts for one target, and one text.

python examples/local_checkpoint.py [TARGET_FOLDER DRAFT_FOLDER]

Without folders it takes a small pair, which `python tools/make_pair.py` writes.

Needs: pip install '.[torch]'
"""

import asyncio
import sys
from pathlib import Path

from llm_spec import CascadeDraft, PromptLookup, ProviderDraft, SpeculativeDecoder

try:
    from llm_spec_torch import TorchProvider
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; run: pip install '.[torch]'") from error

PAIR = Path(__file__).parents[1] / "tests" / "peers" / "models"


async def main(target_folder: str, draft_folder: str) -> None:
    target, draft = TorchProvider(target_folder), TorchProvider(draft_folder)
    drafts = {
        "nothing": None,
        "a smaller model": ProviderDraft(draft),
        "lookup, else a smaller model": CascadeDraft(PromptLookup(), ProviderDraft(draft)),
        "the target's first two layers": ProviderDraft(TorchProvider(target.model.make_early_exit_draft(2))),
    }
    texts: set[str] = set()
    for name, proposing in drafts.items():
        decoder = SpeculativeDecoder(target=target, draft=proposing)
        result = await decoder.decode("def decode(self, input, final=False):", max_tokens=64, temperature=0.7, seed=3)
        texts.add(result.content)
        print(f"{name:<30} {result.summary()}")
    print(texts.pop(), "\n\nfour answers, one text" if not texts else "the texts differ")


if __name__ == "__main__":
    folders = sys.argv[1:] or [str(PAIR / "target"), str(PAIR / "draft")]
    if len(folders) != 2 or not all(Path(folder).exists() for folder in folders):
        raise SystemExit("name two folders that exist, or none and run before: python tools/make_pair.py")
    asyncio.run(main(*folders))
