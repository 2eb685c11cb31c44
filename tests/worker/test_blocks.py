"""Blocks are never lost, never taken twice, and found only by the tokens that filled them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from equipoise.wire.block_keys import keys_of
from equipoise.worker.blocks import BlockPool, BlockTable, found_blocks

SIZE = 2


def table_of(pool, tokens):
    return BlockTable(pool, keys_of(tokens, block_tokens=pool.block_tokens))


class Held:
    """A sequence that holds blocks, and what the cache should have of it."""

    def __init__(self, table, tokens, num_run):
        self.table, self.tokens, self.num_run = table, tokens, num_run


class Blocks(RuleBasedStateMachine):
    """Sequences come, run, and go, against what memory really holds."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(num_blocks=7, block_tokens=SIZE)
        # Which tokens up to and with a block's own are in it now.
        self.memory = {}
        self.alive = []

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def begin(self, tokens):
        table = table_of(self.pool, tokens)
        assert table.num_found_tokens < len(tokens)
        for index, block in enumerate(table.blocks):
            assert self.memory[block] == tokens[: (index + 1) * SIZE]
        held = Held(table, list(tokens), table.num_found_tokens)
        self.alive.append(held)
        return held

    @rule(held=sequences, count=st.integers(1, 4), more=st.lists(st.integers(0, 1), max_size=2))
    def run(self, held, count, more):
        held.tokens += more
        end = min(held.num_run + count, len(held.tokens))
        available, before = self.pool.num_available, len(held.table.blocks)
        wanted = self.pool.blocks_for(end) - before
        if held.table.grow(end):
            assert self.pool.num_available == available - max(0, wanted)
            for position in range(held.num_run, end):
                block = held.table.blocks[position // SIZE]
                assert sum(block in one.table.blocks for one in self.alive) == 1
                self.memory[block] = held.tokens[: position + 1]
            held.num_run = end
            held.table.publish(held.tokens, num_run=end)
        else:
            assert wanted > available
            assert self.pool.num_available == 0

    @rule(held=consumes(sequences))
    def end(self, held):
        held.table.release(num_sound=held.num_run)
        self.alive.remove(held)

    @invariant()
    def every_block_is_held_or_available(self):
        held = {block for one in self.alive for block in one.table.blocks}
        assert self.pool.num_used == len(held)
        assert self.pool.num_used + self.pool.num_available == self.pool.num_blocks

    @invariant()
    def what_a_sequence_has_run_is_still_there(self):
        for one in self.alive:
            for index in range(one.num_run // SIZE):
                block = one.table.blocks[index]
                assert self.memory[block] == one.tokens[: (index + 1) * SIZE]

    @invariant()
    def others_can_find_the_full_blocks_that_a_sequence_holds(self):
        for one in self.alive:
            count = one.num_run // SIZE
            tokens = [*one.tokens[: count * SIZE], 0]
            found = found_blocks(self.pool, keys_of(tokens, block_tokens=SIZE))
            assert [block for _, block in found] == list(one.table.blocks[:count])


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


def run_whole(pool, tokens):
    table = table_of(pool, tokens)
    assert table.grow(len(tokens))
    table.publish(tokens, num_run=len(tokens))
    return table


def test_the_last_token_is_never_cached_because_it_must_run():
    pool = BlockPool(num_blocks=4, block_tokens=2)
    run_whole(pool, [1, 2, 3, 4]).release(num_sound=4)
    assert table_of(pool, [1, 2, 3, 4]).num_found_tokens == 2
    assert table_of(pool, [1, 2, 3, 4, 5]).num_found_tokens == 4


def test_the_same_tokens_after_another_prefix_are_another_block():
    pool = BlockPool(num_blocks=8, block_tokens=2)
    run_whole(pool, [1, 2, 3, 4])
    assert table_of(pool, [3, 4, 9]).num_found_tokens == 0
    assert table_of(pool, [2, 1, 3, 4, 9]).num_found_tokens == 0
    assert table_of(pool, [1, 2, 9, 9, 9]).num_found_tokens == 2


def test_least_recently_used_blocks_are_evicted_first_and_sequence_ends_before_starts():
    pool = BlockPool(num_blocks=4, block_tokens=1)
    for tokens in ([1, 2], [3, 4]):
        run_whole(pool, tokens).release(num_sound=2)
    assert pool.num_findable == 4
    assert table_of(pool, [1, 9]).num_found_tokens == 1
    newcomer = table_of(pool, [7, 8])
    assert newcomer.grow(2)
    assert table_of(pool, [1, 2, 9]).num_found_tokens == 1
    assert table_of(pool, [3, 4, 9]).num_found_tokens == 1


def test_a_shared_block_is_held_until_both_sequences_release_it():
    pool = BlockPool(num_blocks=2, block_tokens=2)
    first = run_whole(pool, [1, 2])
    second = table_of(pool, [1, 2, 3])
    assert second.blocks == first.blocks
    first.release(num_sound=2)
    assert pool.num_used == 1
    assert second.grow(3)
    assert not table_of(pool, [5]).grow(1)
    second.release(num_sound=2)
    assert pool.num_used == 0
    assert pool.take_to_clear() == []


def test_what_nothing_was_generated_from_is_cleared_before_another_writes_there():
    pool = BlockPool(num_blocks=3, block_tokens=2)
    table = run_whole(pool, [1, 2, 3, 4, 5])
    first, second, third = table.blocks
    table.release(num_sound=3)
    assert pool.take_to_clear() == []
    assert table_of(pool, [1, 2, 3, 4, 9]).blocks == (first, second), "both can still be found"
    newcomer = table_of(pool, [7])
    assert newcomer.grow(2)
    assert newcomer.blocks == (third,)
    assert pool.take_to_clear() == [third]
    assert pool.take_to_clear() == []


def test_a_block_whose_tokens_another_one_has_is_suspect():
    """Nothing was generated from it, and the other one is held in its place."""
    pool = BlockPool(num_blocks=2, block_tokens=2)
    key = next(keys_of([1, 2, 3], block_tokens=2))
    first, second = pool.take(), pool.take()
    assert pool.publish(first, key) == first
    assert pool.publish(second, key) == first
    assert pool.take() == second
    assert pool.take_to_clear() == [second]


def test_a_block_that_is_written_as_a_whole_need_not_be_cleared():
    pool = BlockPool(num_blocks=1, block_tokens=2)
    pool.suspect(block := pool.take())
    pool.release(block)
    assert pool.take(as_whole=True) == block
    assert pool.take_to_clear() == []
    pool.release(block)  # It was not written after all.
    assert pool.take() == block
    assert pool.take_to_clear() == [block]
    pool.suspect(block)
    pool.publish(block, next(keys_of([1, 2, 3], block_tokens=2)))
    pool.release(block)
    pool.forget_all()
    assert pool.num_findable == 0
    assert pool.take() == block
    assert pool.take_to_clear() == []
