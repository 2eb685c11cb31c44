"""Refusals are counted by kind, in bounded memory."""

from equipoise.pool.counters import MAX_KINDS, MAX_TEXT, Refusals


def test_each_kind_has_its_count_and_its_latest_words():
    refusals = Refusals()
    refusals.count("report_shape", "worker-1: 3 layers")
    refusals.count("hello_model", "worker-2: 9 experts")
    refusals.count("report_shape", "worker-3: 5 layers")
    assert [(each.kind, each.count, each.latest) for each in refusals.all()] == [
        ("hello_model", 1, "worker-2: 9 experts"),
        ("report_shape", 2, "worker-3: 5 layers"),
    ]


def test_a_kind_that_was_never_refused_counts_nothing():
    refusals = Refusals()
    refusals.count("report_shape", "worker-1: 3 layers")
    assert (refusals.of("report_shape"), refusals.of("hello_model")) == (1, 0)


def test_neither_kinds_nor_words_grow_without_bound():
    refusals = Refusals()
    for number in range(1000):
        refusals.count(f"kind-{number}", "x" * 10_000)
    assert len(refusals.all()) == MAX_KINDS + 1
    assert sum(each.count for each in refusals.all()) == 1000
    assert max(len(each.latest) for each in refusals.all()) == MAX_TEXT
