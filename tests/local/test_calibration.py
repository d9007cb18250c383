"""How likely drafted tokens are right: by what their draft says, and what became of those before them."""

import random

import pytest

from llm_spec.local.calibration import CalibrationMemory, ConfidenceCalibration, ConfidenceRecord

Answer = tuple[float, bool]  # what a draft said of its tokens, and whether they were right


def write_answer(calibration: ConfidenceCalibration, drafts: list[Answer]) -> None:
    """Drafts of one token each."""
    for confidence, is_right in drafts:
        calibration.add_draft([confidence], int(is_right), is_wrong=not is_right)


def remember(*answers: list[Answer]) -> CalibrationMemory:
    memory = CalibrationMemory()
    for drafts in answers:
        calibration = ConfidenceCalibration(half_life=48.0, prior=0.7)
        write_answer(calibration, drafts)
        memory.observe(calibration.describe())
    return memory


def estimate(records: tuple[ConfidenceRecord, ...], confidence: float) -> float:
    """The second token of an answer's first draft: its first one follows nothing that was right."""
    survivals = ConfidenceCalibration(half_life=48.0, prior=0.7, records=records).estimate_survivals([0.9, confidence])
    return survivals[2] / survivals[1]


@pytest.mark.parametrize(("is_right", "confidence"), [(True, 0.3), (False, 0.85)])
def test_a_draft_is_believed_as_far_as_in_earlier_answers(is_right: bool, confidence: float) -> None:
    """One that doubts itself without a reason, and one that is too sure; of another range nothing is known."""
    before = estimate((), confidence)
    after = estimate(remember([(confidence, is_right)] * 12).records, confidence)
    assert abs(after - is_right) < 0.6 * abs(before - is_right)
    assert estimate(remember([(0.5, is_right)] * 12).records, confidence) == before


def test_the_answer_itself_weighs_more_than_earlier_ones() -> None:
    calibration = ConfidenceCalibration(half_life=48.0, prior=0.7, records=remember([(0.5, False)] * 500).records)
    doubtful = calibration.estimate_survivals([0.5])[1]
    write_answer(calibration, [(0.5, True)] * 24)
    assert doubtful < 0.25
    assert calibration.estimate_survivals([0.5])[1] > 0.75


def test_later_answers_weigh_more_than_earlier_ones() -> None:
    """Of a draft that has changed, less than half as many tokens are remembered mostly as it is now."""
    num_judged, num_right = remember([(0.5, False)] * 100, [(0.5, True)] * 48).records[2]
    assert num_right > 0.6 * num_judged


def test_an_answer_without_drafts_leaves_no_record() -> None:
    assert remember([]).records == ()
    assert ConfidenceCalibration(half_life=48.0, prior=0.7).describe() == {}


def test_tokens_without_confidence_are_judged_by_all() -> None:
    calibration = ConfidenceCalibration(half_life=48.0, prior=0.7)
    calibration.add_draft([None, None, None], 2, is_wrong=True)
    assert calibration.describe() == {}
    assert calibration.estimate_survivals([None])[1] == pytest.approx(calibration.rate)


def test_what_was_kept_of_a_draft_is_what_a_new_look_says() -> None:
    """Estimates are made token by token, of other drafts in between, and after it has learned."""
    rng = random.Random(0)  # noqa: S311 - a seed gives one answer
    reused, fresh = (ConfidenceCalibration(half_life=48.0, prior=0.7) for _ in range(2))
    for _ in range(50):
        confidences = [rng.choice([None, rng.random()]) for _ in range(rng.randrange(1, 9))]
        for count in range(len(confidences) + 1):
            reused.estimate_survivals(confidences[:count])
        reused.estimate_survivals(confidences[:2])
        reused.estimate_survivals([0.1, *confidences])
        expected = fresh.estimate_survivals(confidences)
        assert list(reused.estimate_survivals(confidences)) == list(expected)
        num_right = rng.randrange(len(confidences) + 1)
        for calibration in (reused, fresh):
            calibration.add_draft(confidences, num_right, is_wrong=num_right < len(confidences))
            calibration.decay(3)
