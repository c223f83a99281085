# SPDX-License-Identifier: Apache-2.0
"""Configurations, policies by T, and the communicators that a policy takes."""

from __future__ import annotations

import json
import re
from operator import ne
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ub_dynamic.backends.names import GEMM_METHODS, overlap_specs, registered_specs, resolve_specs
from ub_dynamic.errors import UBAlignmentError, UBShapeError, UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy, policy_of
from ub_dynamic.policy_difference import MOST_RUNS, differences, sent_runs
from ub_dynamic.shapes import CommSpec

RING, NONE, BULK = OverlapConfig("ring_exchange"), OverlapConfig("none"), OverlapConfig("bulk")


def pipeline(**settings: object) -> OverlapConfig:
    return OverlapConfig("pipeline", **settings)  # type: ignore[arg-type]


class TestOverlapConfig:
    @pytest.mark.parametrize(
        ("method", "settings", "words"),
        [
            ("ring", {}, "unknown overlap method 'ring'; methods are none, bulk, pipeline, ring_exchange"),
            ("none", {"num_sm": 4}, "method 'none' has no setting num_sm; it has no settings"),
            ("bulk", {"num_splits": 4}, "method 'bulk' has no setting num_splits; it has num_sm"),
            ("bulk", {"num_sm": 0}, "num_sm = 0 of method 'bulk' must be at least 1; the next valid value is 1"),
            ("pipeline", {"num_sm": True}, "num_sm = True of method 'pipeline' must be int, as in num_sm=4"),
            ("ring_exchange", {"aggregate": 1}, "aggregate = 1 of method 'ring_exchange' must be bool: True or False"),
        ],
    )
    def test_what_a_method_does_not_have(self, method: str, settings: dict[str, object], words: str) -> None:
        with pytest.raises(UBShapeError) as raised:
            OverlapConfig(method, **settings)  # type: ignore[arg-type]
        assert str(raised.value) == words

    @pytest.mark.parametrize(
        "config", [NONE, BULK, pipeline(num_sm=2, first_gemm=False), OverlapConfig("bulk", num_sm=9)]
    )
    def test_json_and_back(self, config: OverlapConfig) -> None:
        assert OverlapConfig.from_json(json.loads(json.dumps(config.to_json()))) == config

    @pytest.mark.parametrize(
        ("data", "words"),
        [({"method": "bulk", "sms": 3}, "unknown overlap settings.*sms"), ({"num_sm": 3}, "names its method")],
    )
    def test_bad_json(self, data: dict[str, object], words: str) -> None:
        with pytest.raises(UBShapeError, match=words):
            OverlapConfig.from_json(data)


def stage(**configs: OverlapConfig) -> dict[str, Choice]:
    return {gemm: Choice(config, "a reason") for gemm, config in configs.items()}


class TestPolicy:
    def test_stages(self) -> None:
        policy = Policy((8, 64, 100), (stage(fc2_fprop=NONE), {}, stage(fc2_fprop=RING)))
        assert [policy.stage(tokens) for tokens in (1, 8, 63, 64, 99, 100, 10**6)] == [0, 0, 0, 1, 1, 2, 2]
        assert policy.choices(64) == {} and policy.choices(100)["fc2_fprop"] == (RING, "a reason")
        assert policy.configurations() == {"fc2_fprop": (NONE, RING)}

    @pytest.mark.parametrize(("starts", "count"), [((), 0), ((1, 2), 1), ((2, 1), 2), ((1, 1), 2)])
    def test_starts_ascend_and_fit_the_stages(self, starts: tuple[int, ...], count: int) -> None:
        with pytest.raises(UBShapeError, match="starts"):
            Policy(starts, ({},) * count)

    @pytest.mark.parametrize(
        ("starts", "stages", "words"),
        [
            ((8, 4), ({}, {}), r"starts of a policy ascend; \(8, 4\) do not: 4 follows 8, .* valid value is 9"),
            ((1.5,), ({},), "starts of a policy hold 1.5: each is a T, an int"),
            ((0,), ({},), "hold 0: each is a T, an int; the next valid value is 1"),
            ((1,), (None,), "stage of a policy from T = 1 on is None: it maps GEMMs to choices"),
            ((1,), ({3: Choice(NONE, "")},), 'names the GEMM 3: it is a string, as in "fc2_fprop"'),
            ((1, 5), ({}, {"fc2_fprop": NONE}), r"from T = 5 on has OverlapConfig\(.* for fc2_fprop: it is a Choice"),
            ((1,), ({"fc2_fprop": (NONE, "why")},), "for fc2_fprop: it is a Choice"),
            ((1,), ({"fc2_fprop": Choice("none", "why")},), "for fc2_fprop: it is a Choice"),
        ],
    )
    def test_what_is_no_policy(self, starts: Any, stages: Any, words: str) -> None:
        with pytest.raises(UBShapeError, match=words):
            Policy(starts, stages)

    def test_the_digest_is_of_what_is_chosen_not_of_why(self) -> None:
        base = Policy((1, 8), (stage(fc1_fprop=RING, fc2_fprop=NONE), {}))
        same = Policy((1, 8), ({"fc2_fprop": Choice(NONE, "other"), "fc1_fprop": Choice(RING, "words")}, {}))
        others = [
            Policy((1, 9), base.stages),
            Policy((1, 8), (base.stages[1], base.stages[0])),
            Policy((1, 8), (stage(fc1_fprop=NONE, fc2_fprop=RING), {})),
            Policy((1, 8), (stage(fc1_fprop=OverlapConfig("ring_exchange", aggregate=False), fc2_fprop=NONE), {})),
        ]
        assert base.digest() == same.digest()
        assert len({policy.digest() for policy in (base, *others)}) == 5

    def test_policies_that_do_the_same_have_the_same_digest_and_order(self) -> None:
        one = Policy((1, 8), (stage(fc1_fprop=RING, fc2_fprop=NONE), stage(fc2_fprop=RING)))
        stages = (stage(fc2_fprop=NONE, fc1_fprop=RING),) * 2
        other = Policy((4, 6, 8), (*stages, stage(fc2_fprop=RING)))
        assert one.digest() == other.digest()
        assert list(one.configurations().items()) == list(other.configurations().items())

    @given(st.lists(st.sampled_from([None, RING, NONE]), min_size=1, max_size=40))
    def test_a_callable_is_asked_at_every_t(self, wanted: list[OverlapConfig | None]) -> None:
        tokens = [4 * (index + 1) for index in range(len(wanted))]
        policy = policy_of(lambda gemm, count: wanted[count // 4 - 1], ("fc1_fprop",), tokens)
        for count, config in zip(tokens, wanted, strict=True):
            choice = policy.choices(count).get("fc1_fprop")
            assert (choice.config if choice else None) == config
        assert len(policy.starts) == 1 + sum(map(ne, wanted, wanted[1:]))

    def test_a_callable_returns_configurations(self) -> None:
        with pytest.raises(UBShapeError, match="returned 'none' for fc1_fprop at T = 4: it returns an OverlapConfig"):
            policy_of(lambda gemm, tokens: "none", ("fc1_fprop",), [4])  # type: ignore[arg-type, return-value]


class TestDifferences:
    def told(self, *policies: Policy | None) -> str:
        return differences({2 + index: sent_runs(policy) for index, policy in enumerate(policies)})

    def test_gemm_range_and_what_each_rank_does(self) -> None:
        one = Policy((8, 64, 100), (stage(fc2_fprop=NONE), stage(fc1_fprop=RING), stage(fc2_fprop=RING)))
        other = Policy((1, 32, 64), (stage(fc2_fprop=NONE), stage(fc2_fprop=BULK), stage(fc2_fprop=RING)))
        assert self.told(one, other, one) == (
            "fc1_fprop at T = 64 to 99: ring_exchange on ranks 2, 4, as configured on rank 3; "
            "fc2_fprop at T = 32 to 63: none on ranks 2, 4, bulk on rank 3; "
            "fc2_fprop at T = 64 to 99: as configured on ranks 2, 4, ring_exchange on rank 3"
        )

    def test_no_policy_at_all_and_the_last_range(self) -> None:
        assert self.told(None, Policy((1,), (stage(fc2_fprop=NONE),))) == (
            "fc2_fprop at T >= 1: as configured on rank 2, none on rank 3"
        )

    def test_one_t_and_what_was_not_sent(self) -> None:
        def long(tokens: int) -> Policy:
            starts = range(1, 4 * MOST_RUNS)
            return policy_of(lambda gemm, t: (NONE, RING)[(t + (t == tokens)) % 2], ("fc2_fprop",), starts)

        assert self.told(long(0), long(7)).startswith("fc2_fprop at T = 7: ring_exchange on rank 2, none on rank 3")
        assert f"fc2_fprop at T = {MOST_RUNS}: " in self.told(long(0), long(MOST_RUNS))  # the last that is known

    def test_a_few_of_many(self) -> None:
        every = Policy((1,), (dict.fromkeys(GEMM_METHODS, Choice(NONE, "")),))
        assert self.told(None, every).endswith("; and 5 more ranges")

    @given(st.data())
    def test_exactly_where_the_choices_differ(self, data: st.DataObject) -> None:
        def draw() -> Policy:
            starts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted))
            configs = data.draw(
                st.lists(st.sampled_from([NONE, RING, None]), min_size=len(starts), max_size=len(starts))
            )
            return Policy(tuple(starts), tuple({} if c is None else stage(fc2_fprop=c) for c in configs))

        one, other = draw(), draw()
        wrong = [t for t in range(1, 60) if one.choices(t) != other.choices(t)]
        assert (one.digest() != other.digest()) == bool(wrong)
        if wrong:
            text = self.told(one, other)
            first = re.search(r"fc2_fprop at T (?:= (\d+)|>= (\d+))", text)
            assert first is not None and int(first[1] or first[2]) == wrong[0]

    def test_what_is_sent_is_bounded(self) -> None:
        configs = [NONE, RING]
        long = policy_of(lambda gemm, tokens: configs[tokens % 2], ("fc2_fprop",), range(1, 4 * MOST_RUNS))
        late = policy_of(
            lambda gemm, tokens: configs[(tokens + (tokens > 3 * MOST_RUNS)) % 2],
            ("fc2_fprop",),
            range(1, 4 * MOST_RUNS),
        )
        assert len(sent_runs(long)["fc2_fprop"]) == MOST_RUNS
        assert self.told(long, late) == f"they differ after more than {MOST_RUNS} ranges of T"
        assert self.told(long, None).startswith("fc2_fprop at T = 1: ring_exchange on rank 2")


class TestSpecs:
    configured: ClassVar[dict[str, CommSpec]] = {
        spec.name: spec for spec in resolve_specs((4096, 1024), 2, torch.bfloat16)
    }

    def test_settings_of_the_configured_method(self) -> None:
        found = overlap_specs(self.configured, "fc2_fprop", pipeline(num_splits=8, num_sm=4, first_gemm=True))
        spec = found["fc2_fprop"]
        assert spec is not None and list(found) == ["fc2_fprop"]
        assert (spec.name, spec.num_splits, spec.num_sm) == ("fc2_fprop", 8, 4)

    def test_another_method_has_another_name_and_te_s_defaults(self) -> None:
        spec = overlap_specs(self.configured, "fc2_fprop", RING)["fc2_fprop"]
        assert spec is not None
        assert (spec.name, spec.method, spec.collective) == ("fc2_fprop (ring_exchange)", "ring_exchange", "rs")
        assert (spec.num_splits, spec.num_sm, spec.use_ce) == (2, 1, True)

    def test_wgrad_follows_dgrad(self) -> None:
        none = overlap_specs(self.configured, "fc1_dgrad", NONE)
        ring = overlap_specs(self.configured, "fc1_dgrad", RING)
        bulk = overlap_specs(self.configured, "fc1_dgrad", OverlapConfig("bulk", num_sm=6))
        assert none == {"fc1_dgrad": None, "fc1_wgrad": None}
        assert ring["fc1_wgrad"] is None and ring["fc1_dgrad"] is not None and ring["fc1_dgrad"].collective == "rs"
        assert all(spec is not None and spec.num_sm == 6 and "(" not in spec.name for spec in bulk.values())

    def test_bulk_beside_a_configured_ring(self) -> None:
        made = resolve_specs((4096, 1024), 2, torch.bfloat16, {"fc1_dgrad": {"method": "ring_exchange"}})
        bulk = overlap_specs({spec.name: spec for spec in made}, "fc1_dgrad", BULK)
        names = {name: spec and (spec.name, spec.collective) for name, spec in bulk.items()}
        assert names == {"fc1_dgrad": ("fc1_dgrad (bulk)", "ag"), "fc1_wgrad": ("fc1_wgrad (bulk)", "rs")}

    @pytest.mark.parametrize(
        ("gemm", "config", "error", "words"),
        [
            ("fc3_fprop", NONE, UBUnsupportedError, "unknown GEMM 'fc3_fprop'; known are qkv_fprop"),
            ("fc1_wgrad", BULK, UBUnsupportedError, "unknown GEMM 'fc1_wgrad'"),
            ("fc1_fprop", BULK, UBUnsupportedError, "fc1_fprop has no method 'bulk'; it has none, ring_exchange"),
            ("fc2_fprop", pipeline(num_splits=256), UBAlignmentError, r"multiple of 8 \* num_splits = 2048"),
            ("fc2_fprop", OverlapConfig("ring_exchange", aggregate=True), UBUnsupportedError, "all-gathers"),
        ],
    )
    def test_what_no_module_has(self, gemm: str, config: OverlapConfig, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            overlap_specs(self.configured, gemm, config)

    def test_one_communicator_a_method_with_the_most_splits(self) -> None:
        alternatives = {"fc2_fprop": (NONE, RING, pipeline(num_splits=2), pipeline(num_splits=8)), "fc1_dgrad": (NONE,)}
        made = registered_specs(self.configured.values(), alternatives)
        assert [spec.name for spec in made] == [*self.configured, "fc2_fprop (ring_exchange)"]
        assert next(spec for spec in made if spec.name == "fc2_fprop").num_splits == 8

    def test_every_method_of_every_gemm(self) -> None:
        alternatives = {gemm: tuple(map(OverlapConfig, methods)) for gemm, methods in GEMM_METHODS.items()}
        further = [spec.name for spec in registered_specs(self.configured.values(), alternatives)][
            len(self.configured) :
        ]
        rings = [f"{gemm} (ring_exchange)" for gemm in ("qkv_dgrad", "proj_fprop", "fc1_dgrad", "fc2_fprop")]
        assert sorted(further) == sorted([*rings, "qkv_dgrad (pipeline)", "fc1_dgrad (pipeline)"])
