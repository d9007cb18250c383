"""`benchmarks/client_figures.py` makes the server's figures of what its metrics grew by, and says where they differ."""

from __future__ import annotations

from dataclasses import replace

from client_figures import Comparison, make_server_figures

GROWN = {"answer_seconds_count": 2.0, "answer_seconds_sum": 4.0, "first_text_seconds_sum": 1.0, "tokens_total": 62.0}


def test_figures_are_means_over_the_answers() -> None:
    """Two answers of 31 tokens: 2 s each, of which 0.5 s pass before the first token."""
    figures = make_server_figures(GROWN)
    assert (figures.num_answers, figures.output_tokens) == (2, 31.0)
    assert (figures.first_token_ms, figures.inter_token_ms, figures.request_ms) == (500.0, 50.0, 2000.0)
    assert figures.tokens_per_s == 15.5


def test_what_is_more_than_3_percent_off_differs() -> None:
    """A first token may also be some milliseconds later at a client."""
    ours = make_server_figures(GROWN)

    def find_different(**theirs: float) -> set[str]:
        comparison = Comparison(
            strategy="plain",
            client="any",
            theirs=replace(ours, **theirs),  # type: ignore[arg-type] # num_answers is not among them
            ours=ours,
            num_drafted=0,
            num_accepted=0,
        )
        return comparison.different_names

    assert find_different() == find_different(request_ms=2050.0, first_token_ms=514.0) == set()
    assert find_different(request_ms=2070.0, inter_token_ms=48.0) == {"request_ms", "inter_token_ms"}
    assert find_different(first_token_ms=520.0) == {"first_token_ms"}
