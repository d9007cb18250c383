"""The models of these tests; without llama.cpp, none of them runs."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp", reason="gguf: run tools/integrations/run.sh gguf, which installs it")

from support.gguf_models import gguf_draft, pair, target, tiny, write_model  # noqa: F401 - fixtures
