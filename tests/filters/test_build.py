from __future__ import annotations

import subprocess
import sys

import pytest

from sluice.config.models import FilterConfig, RewardConfig
from sluice.errors import ConfigError
from sluice.filters import build_domain_filters, build_query_filter, build_response_filter
from sluice.filters.build import QUERY_FILTERS, RESPONSE_FILTERS
from tests.fakes import make_group, make_rollout

NAN, INF = float("nan"), float("inf")


def domain(query=None, response=None):
    return RewardConfig.model_validate(
        {"verifier": {"type": "exact"}, "query_filter_config": query or {"type": "no_filter"}, "response_filter_config": response}
    )


def mean(**arguments):
    return {"type": "mean_filter", "filter_args": arguments}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "std_filtr"}, r"\.type must be one of .* got 'std_filtr' - did you mean 'std_filter'\?"),
        ({"type": "length"}, r"\.type must be one of"),
        (
            {"type": "std_filter", "filter_args": {"std_treshold": 1}},
            r"\.filter_args\.std_treshold is no argument .* did you mean 'std_threshold'",
        ),
        ({"type": "no_filter", "filter_args": {"x": 1}}, r"\.filter_args\.x is no argument of no_filter, which takes none"),
        (mean(), r"\.filter_args\.threshold_down or threshold_up must be given, got neither"),
        (mean(threshold_down=None, threshold_up=None), r"\.filter_args\.threshold_down or threshold_up must be given, got neither"),
        (
            mean(threshold_down=1.0, threshold_up=0.5),
            r"\.filter_args\.threshold_up must be above threshold_down \(1\.0\), got 0\.5 - swap them or drop one",
        ),
        (mean(threshold_down=1, threshold_up=1), r"\.filter_args\.threshold_up must be above threshold_down \(1\.0\), got 1\.0"),
        (mean(threshold_down=NAN), r"\.filter_args\.threshold_down must be a finite number, got nan"),
        (mean(threshold_up=INF), r"\.filter_args\.threshold_up must be a finite number, got inf"),
        (mean(threshold_up="0.9"), r"\.filter_args\.threshold_up must be a finite number, got '0\.9' \(str\)"),
        (mean(threshold_up=True), r"\.filter_args\.threshold_up must be a finite number, got True"),
        (mean(threshold_up=[0.9]), r"\.filter_args\.threshold_up must be a finite number"),
        (mean(threshold_up=10**400), r"\.filter_args\.threshold_up must be a finite number"),
        ({"type": "std_filter", "filter_args": {"std_threshold": -0.1}}, r"\.filter_args\.std_threshold must be at least 0, got -0\.1"),
        ({"type": "std_filter", "filter_args": {"std_threshold": None}}, r"\.filter_args\.std_threshold must be a finite number, got None"),
        ({"type": "all"}, r"\.filter_args\.filters must be a list of at least one filter, got nothing"),
        ({"type": "any", "filter_args": {"filters": []}}, r"\.filter_args\.filters must be a list of at least one filter, got \[\]"),
        ({"type": "all", "filter_args": {"filters": {"type": "std_filter"}}}, r"\.filter_args\.filters must be a list"),
        ({"type": "all", "filter_args": {"filter": 1}}, r"\.filter_args\.filter is no argument of all, .* did you mean 'filters'"),
        ({"type": "not"}, r"\.filter_args\.filter must be a filter, got nothing"),
        ({"type": "all", "filter_args": {"filters": ["std_filter"]}}, r"\.filter_args\.filters\[0\] must be a mapping with the key type"),
        ({"type": "all", "filter_args": {"filters": [{"typ": "std_filter"}]}}, r"filters\[0\]\.typ is no setting.*did you mean 'type'"),
        ({"type": "all", "filter_args": {"filters": [{}]}}, r"filters\[0\]\.type must be given"),
        ({"type": "all", "filter_args": {"filters": [{"type": 3}]}}, r"filters\[0\]\.type must be the name of a filter, got 3"),
        (
            {"type": "not", "filter_args": {"filter": {"type": "no_filter", "filter_args": 3}}},
            r"filter\.filter_args must be a mapping, got 3",
        ),
        ({"type": "not", "filter_args": {"filter": {"type": "no_filter", "metric": 3}}}, r"filter\.metric must be the name of a metric"),
        (
            {"type": "any", "filter_args": {"filters": [{"type": "no_filter"}, {"type": "not", "filter_args": {"filter": mean()}}]}},
            r"\.filter_args\.filters\[1\]\.filter_args\.filter\.filter_args\.threshold_down or threshold_up",
        ),
        ({"type": "all", "metric": "acc", "filter_args": {"filters": [{"type": "no_filter"}]}}, r"\.metric has no effect on all"),
    ],
)
def test_a_bad_query_filter_fails_with_the_path_of_its_key(config, message):
    with pytest.raises(ConfigError, match=rf"^rewards\.math\.query_filter_config.*{message}"):
        build_domain_filters({"math": domain(config)}, group_size=8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "std_filter"}, r"\.type must be one of"),
        ({"type": "length"}, r"\.filter_args\.min_tokens or max_tokens must be given"),
        ({"type": "length", "filter_args": {"max_tokens": 1.5}}, r"\.filter_args\.max_tokens must be a whole number, got 1\.5"),
        ({"type": "length", "filter_args": {"max_tokens": -1}}, r"\.filter_args\.max_tokens must be at least 0, got -1"),
        (
            {"type": "length", "filter_args": {"min_tokens": 5, "max_tokens": 4}},
            r"\.filter_args\.max_tokens must be at least min_tokens \(5\), got 4",
        ),
        ({"type": "length", "metric": "acc", "filter_args": {"max_tokens": 4}}, r"\.metric has no effect on length"),
        ({"type": "reward_range"}, r"\.filter_args\.low or high must be given"),
        ({"type": "reward_range", "filter_args": {"low": 1, "high": 0}}, r"\.filter_args\.high must be at least low \(1\.0\), got 0\.0"),
        ({"type": "format"}, r"\.filter_args\.pattern must be given, got nothing"),
        (
            {"type": "format", "filter_args": {"pattern": "(a"}},
            r"\.filter_args\.pattern must be a regular expression that compiles, got '\(a' \(missing",
        ),
        ({"type": "format", "filter_args": {"pattern": 3}}, r"\.filter_args\.pattern must be a text, got 3"),
        ({"type": "format", "filter_args": {"pattern": "a", "full": "yes"}}, r"\.filter_args\.full must be true or false, got 'yes'"),
        ({"type": "format", "filter_args": {"pattern": "a", "_compiled": 1}}, r"\.filter_args\._compiled is no argument"),
        ({"type": "format", "filter_args": {"pattern": "a", "context": 1}}, r"\.filter_args\.context is no argument"),
        ({"type": "finish_reason"}, r"\.filter_args\.allowed or denied must be given, one of the two, got neither"),
        ({"type": "finish_reason", "filter_args": {"allowed": ["stop"], "denied": ["length"]}}, r"one of the two, got both"),
        ({"type": "finish_reason", "filter_args": {"allowed": []}}, r"\.filter_args\.allowed must be a list with at least one"),
        (
            {"type": "finish_reason", "filter_args": {"denied": ["lenght"]}},
            r"\.filter_args\.denied .* got 'lenght' - did you mean 'length'",
        ),
        ({"type": "finish_reason", "filter_args": {"denied": "length"}}, r"\.filter_args\.denied must be a list of texts, got 'length'"),
        ({"type": "finish_reason", "filter_args": {"denied": [1]}}, r"\.filter_args\.denied must be a list of texts"),
    ],
)
def test_a_bad_response_filter_fails_with_the_path_of_its_key(config, message):
    with pytest.raises(ConfigError, match=rf"^rewards\.math\.response_filter_config.*{message}"):
        build_domain_filters({"math": domain(response=config)}, group_size=8)


def test_a_spread_filter_anywhere_is_refused_for_groups_of_one():
    nested = {"type": "any", "filter_args": {"filters": [{"type": "not", "filter_args": {"filter": {"type": "std_filter"}}}]}}
    with pytest.raises(ConfigError, match=r"filters\[0\]\.filter_args\.filter\.type is std_filter.*num_return_sequences_in_group"):
        build_domain_filters({"math": domain(nested)}, group_size=1)
    build_domain_filters({"math": domain(mean(threshold_up=1))}, group_size=1)


def test_every_bad_setting_is_told_at_once():
    bad = domain(mean(), {"type": "length"})
    with pytest.raises(ConfigError) as error:
        build_domain_filters({"math": bad, "code": domain({"type": "nope"}), "fine": domain()}, group_size=4)
    lines = str(error.value).splitlines()
    assert [line.split(".filter_args")[0].split(".type")[0] for line in lines] == [
        "rewards.math.query_filter_config",
        "rewards.math.response_filter_config",
        "rewards.code.query_filter_config",
    ]


def test_domains_have_their_own_filters():
    table = build_domain_filters(
        {
            "math": domain({"type": "std_filter"}),
            "code": domain(mean(threshold_up=1), {"type": "length", "filter_args": {"max_tokens": 1}}),
        },
        group_size=4,
    )
    ones = make_group([1.0] * 4)
    assert table["math"].query.judge(ones).reason == "no_spread"
    assert table["code"].query.judge(ones).reason == "too_easy"
    assert table["math"].response is None
    assert table["code"].response is not None
    assert table["code"].response.judge(make_rollout(tokens=2)).reason == "too_long"


def test_an_unknown_domain_is_an_error_that_names_the_known_ones():
    table = build_domain_filters({"math": domain(), "code": domain()}, group_size=4)
    with pytest.raises(ConfigError, match=r"\['code', 'math'\], got 'maths' - did you mean 'math'"):
        table["maths"]
    assert "maths" not in table


def test_survivors_are_permitted_for_all_domains():
    table = build_domain_filters({"math": domain({"type": "std_filter"})}, group_size=4, min_members=2)
    assert table["math"].query.judge([1, 0, None, None]).keep
    for bad in ({"min_members": 0}, {"group_size": 0}):
        with pytest.raises(ConfigError, match="must be at least 1, got 0"):
            build_query_filter({"type": "no_filter"}, **bad)


def test_a_mapping_and_a_model_build_the_same_filter():
    config = {"type": "std_filter", "filter_args": {"std_threshold": 0.5}}
    assert build_query_filter(config) == build_query_filter(FilterConfig.model_validate(config))
    assert build_query_filter({"type": "no_filter", "filter_args": None, "metric": None}).judge([1]).keep
    with pytest.raises(ConfigError, match="response_filter must be a mapping"):
        build_response_filter("length")


def test_every_type_says_its_own_name():
    for table in (QUERY_FILTERS, RESPONSE_FILTERS):
        for kind, cls in table.items():
            assert cls.name == kind
            assert cls.__doc__


def test_filters_and_advantages_import_no_torch():
    heavy = ("torch", "ray", "transformers", "trl")
    code = f"import sys, sluice.filters, sluice.advantage; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
