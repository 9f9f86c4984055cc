"""Counts by size."""

from jaxctx_server.metrics.histogram import Histogram


def test_a_value_is_in_the_bucket_of_its_upper_bound_and_in_all_larger_ones() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.25, 0.5, 0.75, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == [("0.5", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert (histogram.count, histogram.sum) == (4, 4.5)


def test_several_equal_values_count_as_so_many() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5, 3)
    assert histogram.buckets() == [("1.0", 3.0), ("+Inf", 3.0)]
    assert (histogram.count, histogram.sum) == (3, 1.5)


def test_a_copy_stays_as_it_is() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    copied = histogram.copy()
    histogram.observe(2.0)
    assert (copied.count, copied.sum) == (1, 0.5)
    assert (histogram.count, histogram.sum) == (2, 2.5)
