"""The default batch: seeded, and over every reachable id where it fits."""

import torch

from tasks.batches import random_batch, row_batch


def test_every_reachable_id_occurs_where_there_is_room():
    ids = random_batch(320, 128).input_ids
    assert ids.shape == (4, 128)
    assert set(ids.reshape(-1).tolist()) == set(range(320))


def test_a_larger_vocabulary_is_sampled_without_repeats():
    ids = random_batch(50_000, 4096).input_ids
    assert ids.shape == (4, 128)
    assert len(set(ids.reshape(-1).tolist())) == 512


def test_rows_are_no_longer_than_the_model_takes():
    assert random_batch(99, 32).input_ids.shape == (4, 32)


def test_the_same_request_gives_the_same_ids_and_touches_no_global_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(random_batch(99, 32).input_ids, random_batch(99, 32).input_ids)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_row_is_cut_and_an_empty_one_is_none():
    row = row_batch("text", list(range(200)), 150)
    assert row is not None
    assert row.input_ids.tolist() == [list(range(128))]
    assert row_batch("text", [], 150) is None
