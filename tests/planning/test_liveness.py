from equipoise.planning.liveness import alive


def test_a_rank_heard_within_the_timeout_is_alive_and_a_silent_one_is_not():
    liveness = alive({2: 9.0, 0: 5.0, 1: 4.9}, now=10.0, silent_after_s=5.0)
    assert liveness.alive == (0, 2)
    assert set(liveness.silent) == {1}


def test_silence_is_explained_with_its_numbers():
    liveness = alive({3: 1.0}, now=10.0, silent_after_s=5.0)
    assert liveness.silent[3] == "rank 3 has been silent for 9.0 s, more than the allowed 5 s"


def test_an_empty_pool_has_no_alive_ranks():
    assert alive({}, now=0.0, silent_after_s=1.0).alive == ()
