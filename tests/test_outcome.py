"""What a run's last lines say."""

from __future__ import annotations

from jobs.outcome import Exit, Outcome, summary


def lines(**values: object) -> list[str]:
    base: dict[str, object] = {
        "exit": Exit.COMPLETE,
        "state": "complete",
        "model_version": "m-1",
        "expected": 1000,
        "scored": 1000,
        "scored_now": 500,
        "scoring_seconds": 5.0,
    }
    return summary(Outcome(**(base | values)))  # type: ignore[arg-type]


def test_summary_counts_what_is_scored_dead_and_missing() -> None:
    assert lines(scored=990, dead=4)[0].startswith("Complete: 990 scored, 4 dead, 6 missing of 1,000")


def test_summary_tells_the_share_that_was_cut() -> None:
    assert "Cut to 256 tokens: 20 (4.0%)." in lines(truncated=20, workers={"max_length": "256"})
    assert not any("Cut" in line for line in lines(truncated=0))


def test_summary_tells_what_the_canaries_said() -> None:
    figures = {"canaries": 8.0, "alone_against_batched": 1.2e-7}
    assert "8 canaries scored: alone and batched within 1e-07." in lines(preflight=figures)
    half = lines(preflight=figures | {"against_float32": 0.0031})
    assert "8 canaries scored: alone and batched within 1e-07, beside float32 within 0.003." in half
    assert "8 canaries scored." in lines(preflight={"canaries": 8.0})
    assert not any("canaries" in line for line in lines())


def test_summary_tells_where_the_workers_time_went() -> None:
    said = lines(shares={"forward": 0.9, "wait": 0.05, "read": 0.001})
    assert said[1].endswith("Of the workers' time: forward 90%, wait 5%.")
