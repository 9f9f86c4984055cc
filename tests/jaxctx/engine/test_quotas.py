"""Quotas of a tenant and the budget of its pins: what is charged, what is refused, what is given back."""

import random
from dataclasses import replace

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.interface import Caller
from jaxctx.engine.quotas import Quotas
from jaxctx.errors import InvalidArgument, ResourceExhausted

ME, OTHER = Caller("me"), Caller("other")
CONFIG = EngineConfig(pages=64, max_batch=8, max_batch_tokens=64, max_context_tokens=512, pinned_pages_per_tenant=20)


# --- the account ------------------------------------------------------------------------------------------------------


def test_charges_against_a_plain_dict() -> None:
    source, quotas, plain = random.Random(3), Quotas(CONFIG), {}
    for _ in range(5000):
        tenant, holder, pages = source.choice("ab"), source.randrange(5), source.randrange(12)
        if source.random() < 0.3:
            quotas.unpin(tenant, holder)
            plain.pop((tenant, holder), None)
        else:
            more = pages - plain.get((tenant, holder), 0)
            used = sum(charge for (owner, _), charge in plain.items() if owner == tenant)
            if more <= 20 - used:
                quotas.check_pin(tenant, holder, pages)
                quotas.charge(tenant, holder, pages)
                plain[tenant, holder] = pages
            else:
                with pytest.raises(ResourceExhausted, match=f" {20 - used} remain") as error:
                    quotas.check_pin(tenant, holder, pages)
                assert error.value.reason == "PIN_BUDGET"
        for owner in "ab":
            assert quotas.pinned(owner) == sum(charge for (each, _), charge in plain.items() if each == owner)
    for tenant, holder in plain:
        quotas.unpin(tenant, holder)
    assert not quotas._charges
    assert not quotas._pinned


def test_snapshot_quotas_name_what_is_exceeded() -> None:
    quotas = Quotas(replace(CONFIG, max_snapshots_per_tenant=3, max_snapshot_bytes_per_tenant=1000))
    quotas.check_snapshots(3, 1000)
    for count, size, name in (
        (4, 0, "max_snapshots_per_tenant is 3"),
        (1, 1001, "max_snapshot_bytes_per_tenant is 1000"),
    ):
        with pytest.raises(ResourceExhausted, match=name) as error:
            quotas.check_snapshots(count, size)
        assert error.value.reason == "QUOTA"
    Quotas(CONFIG).check_snapshots(10**9, 10**15)


@pytest.mark.parametrize("name", ["max_contexts_per_tenant", "pinned_pages_per_tenant", "max_snapshots_per_tenant"])
def test_a_negative_quota_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        replace(CONFIG, **{name: -1})


def test_half_of_the_pages_may_be_pinned_by_default() -> None:
    assert EngineConfig(pages=9).pin_budget == 4
    assert EngineConfig(pages=9, pinned_pages_per_tenant=0).pin_budget == 0
