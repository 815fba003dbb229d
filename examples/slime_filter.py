"""A dynamic sampling filter for slime or miles, called here as they call it. Run it: python examples/slime_filter.py

In a run: --dynamic-sampling-filter-path slime_filter.keep, with this folder on PYTHONPATH.
"""

from dataclasses import dataclass

from sluice.integrations.slime import dynamic_filter

keep = dynamic_filter(
    {
        "type": "all",
        "filter_args": {"filters": [{"type": "std_filter"}, {"type": "mean_filter", "filter_args": {"threshold_up": 0.9}}]},
    }
)


@dataclass
class Sample:
    """As much of a sample of slime as this filter reads."""

    reward: float | None
    response_length: int = 100


if __name__ == "__main__":
    for rewards in ([1.0, 0.0, 1.0, 1.0], [0.1, 0.1, 0.1], [1.0, 1.0, 1.0, 0.8], [1.0, None, 0.0]):
        answer = keep(None, [Sample(reward) for reward in rewards])
        print(f"{rewards!s:24} keep={answer.keep!s:5} reason={answer.reason}")
