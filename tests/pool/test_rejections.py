"""Rejections are counted by kind, in bounded memory."""

from equipoise.pool.counters import MAX_KINDS, MAX_TEXT, Rejections


def test_each_kind_has_its_count_and_its_latest_words():
    rejections = Rejections()
    rejections.count("report_shape", "worker-1: 3 layers")
    rejections.count("hello_model", "worker-2: 9 experts")
    rejections.count("report_shape", "worker-3: 5 layers")
    assert [(each.kind, each.count, each.latest) for each in rejections.all()] == [
        ("hello_model", 1, "worker-2: 9 experts"),
        ("report_shape", 2, "worker-3: 5 layers"),
    ]


def test_a_kind_that_was_never_rejected_counts_nothing():
    rejections = Rejections()
    rejections.count("report_shape", "worker-1: 3 layers")
    assert (rejections.of("report_shape"), rejections.of("hello_model")) == (1, 0)


def test_neither_kinds_nor_words_grow_without_bound():
    rejections = Rejections()
    for number in range(1000):
        rejections.count(f"kind-{number}", "x" * 10_000)
    assert len(rejections.all()) == MAX_KINDS + 1
    assert sum(each.count for each in rejections.all()) == 1000
    assert max(len(each.latest) for each in rejections.all()) == MAX_TEXT
