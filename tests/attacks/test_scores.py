"""The judge: intervals against known values, identification, assignment, controls, membership."""

import numpy as np
import pytest
import torch

from flwr_replay.attacks.intervals import auc_estimate, share
from flwr_replay.attacks.membership import equal_label_shares, membership
from flwr_replay.attacks.scores import Judge, assigned, psnr
from flwr_replay.errors import ConfigError


def images(number: int, seed: int = 0, size: int = 12) -> torch.Tensor:
    return torch.rand(number, 1, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("hits", "tries", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_newcombes_table(hits: int, tries: int, low: float, high: float) -> None:
    interval = share(hits, tries)  # Newcombe 1998, doi 10.1002/(SICI)1097-0258(19980430)17:8<857, Table I, method 3
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    mirrored = share(tries - hits, tries)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=5e-5)


def test_an_aucs_interval_holds_the_truth_19_times_of_20() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):  # two normal distributions one standard deviation apart: AUC 0.7602
        positives, negatives = rng.normal(1, 1, 60), rng.normal(0, 1, 60)
        estimate = auc_estimate(float((positives[:, None] > negatives).mean()), 60, 60)
        held += estimate.low <= 0.7602 <= estimate.high
    assert 0.92 <= held / 300 <= 0.98


def test_an_auc_of_one_has_an_interval() -> None:
    perfect = auc_estimate(1.0, 20, 20)
    assert perfect.high == 1
    assert 0.75 < perfect.low < 0.95


def test_psnr_is_the_formula() -> None:
    x = images(3)
    assert psnr(x, x * 0 + 0.5).tolist() == pytest.approx((-10 * (x - 0.5).square().mean((1, 2, 3)).log10()).tolist())


def test_originals_with_a_little_noise_are_identified_and_controls_are_not() -> None:
    originals, rows = images(200), torch.arange(0, 200, 2)
    judge, recovered = Judge(originals), (originals[rows] + 0.1 * images(100, seed=1)).clamp(0, 1)
    scores = judge.scores(recovered, rows)
    assert scores.identified.value == 1
    assert scores.chance == 1 / 200
    assert scores.ssim is not None
    assert scores.ssim > 0.9
    control = judge.control(recovered, rows)
    assert control is not None
    assert control.identified.value == 0
    assert control.psnr < scores.psnr - 5


def test_pure_guesses_are_at_chance() -> None:
    judge, rows = Judge(images(10)), torch.arange(10).repeat(40)
    guesses = images(10)[torch.randint(10, (400,), generator=torch.Generator().manual_seed(1))]
    identified = judge.scores(guesses, rows).identified
    assert identified.low < 0.1 < identified.high


def test_another_copy_of_the_right_image_is_the_right_one() -> None:
    twice = images(4).repeat(2, 1, 1, 1)
    assert Judge(twice).scores(twice[4:], torch.arange(4, 8)).identified.value == 1


def test_the_mean_image_points_to_one_original_only() -> None:
    judge = Judge(images(50))
    assert judge.mean_image(images(30, seed=2), torch.arange(50)).identified.value == 1 / 50


def test_the_nearest_auxiliary_image_is_at_least_as_near_as_any() -> None:
    judge, auxiliary, rows = Judge(images(20)), images(30, seed=2), torch.arange(20)
    best = judge.nearest_auxiliary(auxiliary, rows).psnr
    assert all(best >= judge.scores(example.expand(20, -1, -1, -1), rows).psnr for example in auxiliary)


def test_assignment_is_blind_to_order() -> None:
    originals = images(8)
    guesses = (originals + 0.3 * images(8, seed=1)).clamp(0, 1)
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(assigned(originals[shuffled], originals), shuffled)
    in_order = Judge(originals).scores(guesses, torch.arange(8), batch=8)
    for rows in (torch.arange(8), torch.arange(8).flip(0)):
        again = Judge(originals).scores(guesses[shuffled], rows, batch=8)
        assert again.psnr == pytest.approx(in_order.psnr)
        assert again.identified == in_order.identified
    assert Judge(originals).scores(guesses[shuffled], torch.arange(8)).psnr < in_order.psnr
    assert Judge(images(40)).scores(guesses, torch.arange(8), batch=8).chance == 8 / 40


def test_a_batch_of_the_whole_institution_has_no_control() -> None:
    assert Judge(images(8)).control(images(8), torch.arange(8), batch=8) is None


@pytest.mark.parametrize("batch", [1, 4])
def test_originals_that_are_not_numbers_identify_nothing(batch: int) -> None:
    scores = Judge(images(8) * float("nan")).scores(images(8), torch.arange(8), batch)
    assert scores.identified.value == 0
    assert np.isnan(scores.psnr)


def test_membership_scores_are_counts() -> None:
    members, others = torch.tensor([5.0, 4.0, 3.0, 0.5]), torch.tensor([2.0, 1.0, 0.0, -1.0])
    scores = membership(members, others)
    assert scores.auc.value == 14 / 16
    assert scores.tpr_at_1_percent.value == 3 / 4
    assert membership(torch.ones(9), torch.ones(9)).tpr_at_1_percent.value == 0


def test_non_members_have_the_members_label_shares() -> None:
    own, foreign = np.repeat([0, 1, 2], [50, 5, 3]), np.repeat([0, 1, 3], [20, 30, 9])
    members, others = equal_label_shares(own, foreign, seed=0)
    assert np.bincount(own[members]).tolist() == np.bincount(foreign[others]).tolist() == [20, 5]
    assert len(set(members)) == len(members)
    with pytest.raises(ConfigError, match="share a label"):
        equal_label_shares(own, own + 7, seed=0)


def test_one_patients_image_in_all_places_counts_in_each() -> None:
    own, others, labels = images(6), images(6, seed=1), torch.arange(6) % 3
    scores = Judge(own).nearer(own[:1].expand(5, -1, -1, -1), labels, others, labels)
    assert (scores.number, scores.nearer, scores.own) == (5, 5, 6)
    assert scores.p > 0.05  # one image five times is one piece of evidence
    nearer = Judge(own).nearer(torch.cat([own, others[:1]]), labels, others, labels)
    assert (nearer.nearer, nearer.number) == (6, 7)
    assert nearer.p < 0.1


def test_strangers_of_ordered_classes_are_at_the_null() -> None:
    labels, counts = torch.arange(20) // 10, []
    for seed in range(40):
        own, others, recovered = (
            0.3 * images(20, 3 * seed + i, 6) + 0.7 * labels[:, None, None, None] for i in range(3)
        )
        counts.append(Judge(own).nearer(recovered[:10], labels, others, labels, seed))
    assert 0.35 < np.mean([count.nearer / 10 for count in counts]) < 0.65
    assert all(3 < count.by_chance < 7 for count in counts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("alike", [False, True])
def test_chance_holds_for_noise_and_for_mean_images(alike: bool) -> None:
    labels, above = torch.arange(8) % 2, 0
    for seed in range(200):
        own, others, recovered = images(8, 3 * seed, 3), images(8, 3 * seed + 1, 3), images(6, 3 * seed + 2, 3)
        recovered = torch.full_like(recovered, 0.5) if alike else recovered
        scores = Judge(own).nearer(recovered, labels, others, labels, seed)
        above += scores.nearer > scores.by_chance_95
    assert above <= 10


def test_originals_without_numbers_are_near_to_nothing() -> None:
    labels = torch.zeros(8)
    scores = Judge(images(8) * float("nan")).nearer(images(4), labels, images(8, seed=1), labels)
    assert scores.nearer == 0
