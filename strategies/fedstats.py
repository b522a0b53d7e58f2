"""FedStats: the server's half; the institution's half is `clients/fedstats.py`.

Source: Legate et al. 2023 (arXiv 2306.03937, FedNCM), nearest class means (Mensink et al. 2013) of all institutions on
fixed features; Guan, Zhou and Gu 2025 (arXiv 2503.06962, FedCGS) for one covariance of all; Fanì et al. 2024 (arXiv
2406.01116, Fed3R) for ridge. Noise on the sums is ours: the Gaussian mechanism, Balle and Wang 2018 (arXiv 1805.06530).
Idea: Every institution sums the features of its images, class by class, and perhaps their products, and sends the sums
once. The classifier that they make does not depend on who has which images.
Travels: the weights, to every institution (`Summarise`); once from each the sums, of the size of a head, and perhaps
F (F + 1) / 2 numbers more, with F features (`ClassSums`).

    at institution k:  S_k,c ← Σ f_i over its examples of class c,  n_k,c ← their number        ‖f_i‖ ≤ C
                       G_k ← Σ f_i f_iᵀ over all
    at the server:     μ_c ← Σ_k S_k,c / Σ_k n_k,c
                       an image with features f is of the class with the largest  (f − μ_c/2)ᵀ W⁻¹ μ_c
    head=means:        W = 1, nearest class means
    a regression:      y, clipped to task.label-range, is one more feature of the only class; ridge regression
    head=ridge:        the same, of 1 for an image's class and 0 for others
    head=mlp:          all above a frozen encoder, its features here, is trained on draws of N(μ_c, W) at the server
    head=lda:          W = (Σ_k G_k − Σ_c n_c μ_c μ_cᵀ) / n, linear discriminants; every class as frequent as another
    priors=noisy:      ... + log(n_c / n)

What is protected: With dp=statistics the sums have Gaussian noise. All of an institution's one message but numbers of
examples is (ε, δ)-DP for one patient more or less, all of whose images there are clipped together, where the data name
patients; else for one image more or less. Without it nothing is: of a class with one image its features leave.

Deviations: FedCGS's covariance is about the mean of all, and its head knows how many images a class has; ours is about
each μ_c, and no class is more frequent. FedNCM's code brings each μ_c to norm 1 and leaves the fresh biases; its
fine-tuning is not here. Where sums have noise, squares of μ_c are corrected by what the noise adds on average, and no
class counts as smaller than six times the noise of its number. W has no negative variances, and something is added to
each (`flwr_replay.learning.heads`). Logits of head=means are scaled to a fixed margin, which changes no decision. An
institution that is late sends its sums when it comes; later rounds ask nobody twice. head=auto asks for products if the
noise of a class mean, of n/C examples, would have a norm below a sixth of the clip. Beyond, products are mostly noise,
and their share of ε is missing elsewhere. head=mlp takes so many passes over as many fresh draws as there were
examples, by the options of `training`, in one round, and the same from the same seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from flwr_replay.config.sections import PASSES, Range, ReplayConfig, TaskConfig, one_of, require, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import RunError, refuse_each
from flwr_replay.learning.draws import Draws, frozen_features
from flwr_replay.learning.heads import discriminants, linear_head, nearest_means, ridge
from flwr_replay.learning.latents import on_device
from flwr_replay.learning.tasks import Regression
from flwr_replay.learning.training import make_optimizer, torch_rng
from flwr_replay.models import placed
from flwr_replay.models.layers import step
from flwr_replay.movements.base import Settings
from flwr_replay.movements.parallel import Parallel
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.fedstats import MOST_FEATURES, PRODUCTS, SUMS, ClassSums, Summarise, pairs_of
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.privacy.sums import WITH_LABEL, noises
from flwr_replay.server.members import Member
from flwr_replay.server.sums import Moments
from flwr_replay.wire.records import StateDict, Weights, opened
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["CLIPS", "FedStats", "FedStatsConfig"]

CLIPS = Range(1e-6, 1e6, "lies in [1e-6, 1e6]")
NEVER = -1e3  # bias of a class of which nobody has an example
CLEAR = 1 / 6  # of the clip: the largest noise of a class mean for head=lda; chosen as simulations/private.py says


@dataclass(frozen=True, kw_only=True)
class FedStatsConfig(StrategyConfig):
    """Options of FedStats."""

    name = "fedstats"
    traits = Traits(summed=True, dp_mechanisms=(STATISTICS,))
    clip: float = 10.0  # C, the largest L2 norm of an image's features
    head: str = "auto"  # means | lda | ridge | mlp, on draws | auto: lda, or means for much noise or many features
    priors: str = "equal"  # of head=lda: equal | noisy, by the numbers of examples in the sums
    passes: int = 10  # of head=mlp over draws

    def __post_init__(self) -> None:
        one_of("strategy.head", self.head, ("auto", "means", "lda", "ridge", "mlp"))
        one_of("strategy.priors", self.priors, ("equal", "noisy"))
        within("strategy.", self, passes=(1, PASSES), clip=CLIPS)

    def check_task(self, task: TaskConfig) -> None:
        """Refuse masks, and numbers without bounds."""
        require(
            task.kind != "segmentation",
            f"strategy=fedstats sums features class by class, or with a number; task={task.name} is a segmentation: "
            "choose another task, or another strategy",
        )
        if task.kind == "regression":
            require(
                bool(task.label_range),
                f"strategy=fedstats clips labels to public bounds; task={task.name} has none: set "
                "task.label-range=[LOWEST,HIGHEST]",
            )
            require(self.head == "auto", f"a regression's head is ridge regression; got head={self.head}: leave it out")

    @property
    def instructed(self) -> Mapping[str, object]:
        """Nobody asks for products or features that a head does not need."""
        products = {"products": 0} if self.head == "means" else {}
        return products | ({} if self.head == "mlp" else {"sums": 0})

    @property
    def takes_steps(self) -> bool:
        """Only a head that learns from draws."""
        return self.head == "mlp"

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """One message, however many rounds there are."""
        return {STATISTICS: 1}


class FedStats(Parallel):
    """Every institution sends sums once; the server makes a classifier of them."""

    config_type = FedStatsConfig
    config: FedStatsConfig
    needs = ("model",)
    stages = ("summarise", "evaluate")
    answer = ClassSums

    sums: StateDict  # Σ_k n_k times what institution k has sent: S and n
    held: tuple[str, ...] = ()  # whose sums these are
    variance: float = 0.0  # Σ_k σ_k², of the noise in units of the clip

    @classmethod
    def check(cls, config: FedStatsConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse changed images, a model without a linear head, and products of too many features."""
        refuse_each(
            partial(super().check, config, settings, names),
            lambda: require(
                not settings.training.changes,
                "strategy=fedstats takes each image once, as it is: set training.augment=none",
            ),
        )
        if settings.model is not None:
            numbers = isinstance(settings.task, Regression)
            sure = config.head in ("lda", "ridge") or numbers
            features = linear_head(settings.model(0))[1].in_features + numbers
            if config.head == "mlp":
                features, sure = frozen_features(settings.model(0)), True
                require(not numbers, "features are drawn of classes; the task is a regression: choose another task")
            require(
                not sure or features <= MOST_FEATURES,
                f"head={config.head} sums products of at most {MOST_FEATURES:,} features; this model's head takes "
                f"{features:,}: choose {'' if numbers else 'strategy.head=means, or '}a smaller model",
            )
            if sure and settings.privacy and settings.privacy.institutions:
                settings.privacy.check_room(pairs_of(features))

    @cached_property
    def head(self) -> tuple[str, str, int, int]:
        """Names of the head's weights, (C, F), and biases, (C,); C, and F of the features that are summed."""
        assert self.settings.model is not None
        model = self.settings.model(0)
        name, head = linear_head(model)
        return (
            f"{name}.weight",
            f"{name}.bias",
            head.out_features,
            frozen_features(model) if self.drawn else head.in_features,
        )

    @property
    def drawn(self) -> bool:
        """Whether features are drawn, of what a frozen encoder makes."""
        return self.config.head == "mlp"

    @property
    def regresses(self) -> bool:
        """Whether labels are numbers."""
        return isinstance(self.settings.task, Regression)

    @property
    def products(self) -> int:
        """How many products of features are asked for, by public numbers alone."""
        _, _, classes, features = self.head
        if self.regresses:
            return pairs_of(features + 1)
        if self.held:
            asked = PRODUCTS in self.sums
        elif self.config.head == "auto":
            n = sum(member.num_examples for member in self.members.known)
            of_mean = self.noise * noises(1.0, products=False)[1] * features**0.5 * classes / max(n, 1)
            asked = features <= MOST_FEATURES and (of_mean < CLEAR or not self.members.complete)
        else:
            asked = self.config.head in ("lda", "ridge", "mlp")
        return pairs_of(features) if asked else 0

    @property
    def numbers(self) -> int:
        """Those of the head, and products."""
        _, _, classes, features = self.head
        return classes * (1 + features) + self.products

    def reach(self, norm: float, clip: float) -> float:
        """‖f‖ / C: the clip is the method's own."""
        return norm / self.config.clip

    def begin_run(self) -> None:
        """Say which head the sums are for, too."""
        super().begin_run()
        head = "ridge regression" if self.regresses else "lda" if self.products else "means"
        head = head if self.config.head == "auto" else self.config.head
        self.recorder.log(f"head={head}: each institution sends {self.numbers:,} sums once")

    def trainers(self, exchange: int) -> list[Member]:
        """Ask those whose sums are not there yet; of sums under masks, all at once."""
        if self.held and self.settings.hiding.sums_only:
            return []
        return [member for member in self.members if member.name not in self.held]

    def trains_in(self, num_rounds: int) -> Mapping[str, Sequence[int]]:
        """Each institution is asked once, in the first round if it is there."""
        return dict.fromkeys(self.members.names, (1,))

    def train_request(self, exchange: int, arrays: Weights) -> Summarise:
        """Send θ, whose features are summed; nothing but the digest of a frozen encoder names it."""
        run, clip, products = self.settings.run, self.config.clip, self.products
        sums, arrays = (self.numbers - products, {}) if self.drawn else (0, arrays)
        return Summarise(exchange=exchange, arrays=arrays, run=run, clip=clip, products=products, sums=sums)

    def lose(self, lost: Sequence[str]) -> None:
        """Stop: the others' sums are made for just these institutions, and nobody makes others."""
        raise RunError(
            f"sums are made once, to be added to those of the same institutions; {', '.join(lost)} did not answer; "
            f"{self.recorder.failures_line()}: resume the run when all that were asked at first are there, and nobody "
            "else, or begin a new run"
        )

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Add the sums to those before; return θ with what they make."""
        sizes = {member.name: member.num_examples for member in self.members.known}
        plan, names = self.settings.privacy, self.exchanger.answered
        if plan:
            self.variance += sum(plan.share(STATISTICS, sizes[name]) ** 2 for name in names)
        names_of = [name for name in (SUMS, *self.head[:2], PRODUCTS) if name in self.form]
        before = self.sums if self.held else dict.fromkeys(names_of, np.float64(0))
        sent = [(answer.num_examples, opened(answer.arrays)) for answer in answers]
        self.sums = {name: before[name] + sum(n * of[name].astype(np.float64) for n, of in sent) for name in names_of}
        self.held = (*self.held, *names)
        vars(self).pop("gaussians", None)
        few = [] if self.regresses else np.flatnonzero(self.moments.numbers_C < self.moments.n_C).tolist()
        if few:
            least = f"fewer than {self.moments.n_C[few[0]]:,.0f} examples each, too few beside the noise to know of any"
            self.recorder.log(
                f"classes {', '.join(map(str, few))}: {least if self.variance else 'nobody has an example'}; they are "
                "hardly ever predicted: add examples, take less noise if there is some, or set a lower task.classes"
            )
        if not self.sent:  # another strategy trains what lies above the encoder
            return {}
        made = self.taught() if self.drawn else dict(zip(self.head[:2], self.classifier(), strict=True))
        return {**self.sent, **{name: array.astype(self.sent[name].dtype) for name, array in made.items()}}

    @property
    def moments(self) -> Moments:
        """What the sums say; the label of a regression is one more feature."""
        weight, bias, classes, _ = self.head
        pairs, clip = self.sums.get(PRODUCTS), self.config.clip * (WITH_LABEL if self.regresses else 1)
        if self.drawn:
            table = self.sums[SUMS].reshape(classes, -1)
        else:
            table = np.column_stack([self.sums[bias], self.sums[weight], *([pairs[-1:]] if self.regresses else [])])
        return Moments.of(table, pairs, clip, self.variance**0.5)

    @cached_property
    def gaussians(self) -> StateDict:
        """What features are drawn from."""
        return self.moments.gaussians(self.config.clip)

    def draws(self, *purpose: object) -> Draws:
        """Return what draws features, from the run's seed and a purpose."""
        return Draws.of(self.gaussians, self.config.clip, ReplayConfig(), self.settings.seed, *purpose)

    def taught(self) -> StateDict:
        """Return the weights above the encoder, trained on draws from those that were sent."""
        training, model = self.settings.training, placed(self.settings.model(0), self.settings.device)
        load_arrays(model.train(), self.sent)
        optimizer, draws = make_optimizer(model, training, training.lr), self.draws("head")
        for at in range(self.config.passes):
            epoch = draws.epoch(training.batch_size, torch_rng(self.settings.seed, "head", at))
            for f_B, y_B in on_device(epoch, self.settings.device):
                step(model, optimizer, self.task.loss(model(f_B), y_B))
        return to_arrays(model)

    def classifier(self) -> tuple[Any, Any]:
        """Return weights, (C, F), and biases, (C,), that the sums make."""
        clip, by = self.config.clip, self.moments
        about = by.mu_CF, by.n_C, by.noise_C, by.products_FF, by.noise, 1e-6 * clip**2
        if self.regresses:
            mu_F, mean = by.mu_CF[0, :-1], (by.mu_CF[0, -1:] / clip).clip(-1, 1)
            shared_1F = (by.products_FF[-1:, :-1] / clip / by.n_C[0]) - mean * mu_F
            return ridge(mu_F, by.n_C[0], by.noise_C[0], by.products_FF[:-1, :-1], *about[-2:], shared_1F, mean)
        if self.config.head == "ridge":  # an example's target is 1 for its class, 0 for others
            n, share_C = by.n_C.sum(), by.n_C / by.n_C.sum()
            mu_F, noise = share_C @ by.mu_CF, float(np.linalg.norm(share_C * by.noise_C))
            shared_CF = share_C[:, None] * (by.mu_CF - mu_F)
            weight_CF, bias_C = ridge(mu_F, n, noise, *about[-3:], shared_CF, share_C)
        elif by.products_FF.size:
            weight_CF, bias_C = discriminants(*about)
            if self.config.priors == "noisy":
                bias_C = bias_C + np.log(by.n_C / by.n_C.sum())
        else:
            weight_CF, bias_C = nearest_means(by.mu_CF, by.noise_C, least=0.01 * clip**2)
        return weight_CF, np.where((by.numbers_C <= 0) & (self.variance == 0), NEVER, bias_C)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the sums, and whose they are."""
        return (self.sums if self.held else {}), {"held": list(self.held), "variance": self.variance}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore the sums."""
        self.sums, self.held, self.variance = arrays, tuple(values["held"]), values["variance"]
