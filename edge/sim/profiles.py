"""What devices are like: how fast they compute, what memory they have, how fast their links are.

A **population** gives each property a lognormal distribution, by its median and the standard deviation of its natural logarithm
(sigma); a **profile** is one device drawn from it. Draws of a device's properties are independent of each other.

Compute speed is counted in samples/s of one reference task: training ResNet-50 on 224 x 224 images, forward and backward, because
that is what most public figures of unlike devices have in common. A task whose sample costs less says so by ``work``: the cost of
its sample over that of the reference sample, about the ratio of their multiply-accumulates (4.1e9 for the reference; a 784-64-10
perceptron has 5.1e4, work 1.2e-5).

Sources, each read in November 2026; what no source gives is marked as an assumption where it is used:

[flash]   Yang et al., "Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone Data", WWW 2021,
          repository PKU-Chengxu/FLASH: ``speed_distri.json``, down- and uplink of 19 phones in KiB/s, mean and deviation of each,
          and ``benchmark2score.json``, scores of phones from AI Benchmark (Ignatov et al. 2019, arXiv:1910.06663).
[pi]      Repository jafermarq/federated-embedded-vision (Flower Labs): PyTorch training of ResNet-50 on a Raspberry Pi 5: 20
          batches of 16 in 322.3 s, 0.99 samples/s; by the blog post that goes with it a Raspberry Pi 4 needs about twice as long.
[jetson]  Repository NVIDIA-AI-IOT/jetson_benchmarks: inference of ResNet-50 on a Jetson Xavier NX, GPU and both DLAs: 824
          images/s.
[tops]    Peak int8 TOPS of Jetson modules, NVIDIA's figures as quoted by algotechniq.com and blog.us.fixstars.com: AGX Xavier
          32, Orin Nano 40, Orin NX 100, AGX Orin 275 (the Orins with sparsity: half of that without).
[dle]     Repository NVIDIA/DeepLearningExamples, ResNet-50 v1.5 for PyTorch, mixed precision: 8 V100 train 8,322 images/s, 8 A100
          16,621; one V100 (16 GB) trains 1,200 and infers 3,382, so that training costs 2.8 x inference.
[ookla]   Speedtest Global Index, worldwide means, as quoted by my-financial-wealth.com (2020) and tele.net.in (2022): mobile
          35.96 Mbit/s down, 11.22 up, 40 ms; fixed 85.73 down, 45.74 up, 21 ms (September 2020); mobile latency 28 ms (November
          2022).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from fleetddp.common.errors import ConfigError
from fleetddp.edge.sim.draws import Draws

MBIT = 1e6 / 8  # bytes


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(Normal(log(median), sigma)); sigma 0: always the median."""

    median: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma < math.inf):
            raise ConfigError(f"a lognormal needs a finite median > 0 and sigma >= 0; got {self.median} and {self.sigma}")

    @classmethod
    def of_mean(cls, mean: float, sigma: float) -> Lognormal:
        """The one with this mean: its median is lower, by the factor exp(-sigma^2 / 2)."""
        return cls(mean * math.exp(-(sigma**2) / 2), sigma)

    def sample(self, stream: random.Random) -> float:
        """One draw; exactly one normal number is taken from the stream, whatever sigma is."""
        return self.median * math.exp(self.sigma * stream.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Profile:
    """One device. Nothing has a default and nothing may be zero: a forgotten figure cannot make anything free or instant."""

    samples_per_s: float  # training, of the reference task
    memory_mib: float
    down_bytes_per_s: float  # its own link
    up_bytes_per_s: float
    latency_s: float  # of one message, one way: half a round trip
    compute_jitter: float  # sigma of the lognormal factor on each training's duration
    link_jitter: float  # and on each transfer's

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0.0
            if not (least <= value < math.inf) or (value == least and not field.name.endswith("jitter")):
                raise ConfigError(f"a device's {field.name} must be positive and finite (jitter may be 0); got {value}")

    def train_s(self, samples: float, stream: random.Random, *, work: float = 1.0) -> float:
        """Seconds in which it trains on ``samples`` (> 0) samples that cost ``work`` (> 0) times the reference's each; never
        0."""
        if not (0 < samples < math.inf and 0 < work < math.inf):
            raise ValueError(f"training needs a positive number of samples and work per sample; got {samples} and {work}")
        slower = math.exp(stream.gauss(0.0, self.compute_jitter)) if self.compute_jitter else 1.0
        return samples * work / self.samples_per_s * slower


@dataclass(frozen=True, slots=True)
class Population:
    """A kind of device. ``compute_jitter`` and ``link_jitter`` are the same for all of them (see ``Profile``)."""

    samples_per_s: Lognormal
    memory_mib: Lognormal
    down_bytes_per_s: Lognormal
    up_bytes_per_s: Lognormal
    latency_s: Lognormal
    compute_jitter: float
    link_jitter: float


def phones() -> Population:
    """Phones on their owners' Wi-Fi.

    Compute: sigma 0.90 is that of the 225 phones in [flash]'s AI Benchmark list that score above 2,000, that is without those
    that were obsolete when it was made. Median: that a median phone trains like a Raspberry Pi 5 [pi] is an assumption; its
    Cortex-A76 cores are those of 2019's best phones. Links: geometric means and sigmas of the 19 measured phones [flash], 5,172
    KiB/s down and 3,103 up. Link jitter 0.37: the median of their coefficients of variation, 0.38. Latency: [ookla] mobile,
    halved; its sigma, memory and the compute jitter (heat, other apps) are assumptions.
    """
    return Population(
        samples_per_s=Lognormal(0.99, 0.90),
        memory_mib=Lognormal(6144, 0.4),
        down_bytes_per_s=Lognormal(5172 * 1024, 0.48),
        up_bytes_per_s=Lognormal(3103 * 1024, 0.70),
        latency_s=Lognormal(0.014, 0.5),
        compute_jitter=0.2,
        link_jitter=0.37,
    )


def jetsons() -> Population:
    """NVIDIA Jetson modules on fixed broadband.

    Compute: nobody publishes training figures of all of them. Median 74 samples/s: [jetson]'s 824 images/s, over 2 for float16
    instead of int8, over 2.8 for training instead of inference [dle], over 2 because the DLAs cannot train and PyTorch is not
    TensorRT; the factors of 2 are assumptions. Sigma 0.8: that of the modules' peak rates without sparsity [tops]. Links and
    latency: [ookla] fixed; that their sigma is 0.70 is an assumption after the phones' uplinks. Memory (4 to 64 GB modules), the
    latency's sigma and the jitters are assumptions.
    """
    return Population(
        samples_per_s=Lognormal(74.0, 0.8),
        memory_mib=Lognormal(8192, 0.7),
        down_bytes_per_s=Lognormal.of_mean(85.73 * MBIT, 0.70),
        up_bytes_per_s=Lognormal.of_mean(45.74 * MBIT, 0.70),
        latency_s=Lognormal(0.0105, 0.5),
        compute_jitter=0.1,
        link_jitter=0.2,
    )


def gateways() -> Population:
    """Single-board IoT gateways on a cellular network.

    Compute: half of them lie between a Raspberry Pi 4 and a Pi 5 [pi], an assumption: median 0.70 samples/s, the geometric mean
    of the two, and sigma 0.51, which puts the quartiles there. Links and latency: [ookla] mobile of 2020, when modems of that
    kind were sold, sigma 0.70 as with the jetsons. Link jitter as measured of phones [flash]. Memory (1 to 8 GB boards), the
    latency's sigma and the compute jitter are assumptions.
    """
    return Population(
        samples_per_s=Lognormal(0.70, 0.51),
        memory_mib=Lognormal(3072, 0.6),
        down_bytes_per_s=Lognormal.of_mean(35.96 * MBIT, 0.70),
        up_bytes_per_s=Lognormal.of_mean(11.22 * MBIT, 0.70),
        latency_s=Lognormal(0.020, 0.5),
        compute_jitter=0.1,
        link_jitter=0.37,
    )


def datacenter() -> Population:
    """Sites: one server with eight GPUs each.

    Compute: 11,761 samples/s is the geometric mean of eight V100 and eight A100 [dle]; sigma 0.35 puts each of them one sigma
    away. Links (5 Gbit/s between data centres, both ways), latency (40 ms one way, another continent), memory (8 x 80 GB) and
    the jitters are assumptions.
    """
    return Population(
        samples_per_s=Lognormal(11761.0, 0.35),
        memory_mib=Lognormal(655360, 0.3),
        down_bytes_per_s=Lognormal(5000 * MBIT, 0.3),
        up_bytes_per_s=Lognormal(5000 * MBIT, 0.3),
        latency_s=Lognormal(0.040, 0.4),
        compute_jitter=0.02,
        link_jitter=0.1,
    )


POPULATIONS = {"phones": phones, "jetsons": jetsons, "gateways": gateways, "datacenter": datacenter}


def sample(population: Population, draws: Draws, name: str) -> Profile:
    """The device ``name`` of a population: always the same for the same seed and name."""
    stream = draws.stream("profile", name)
    return Profile(
        samples_per_s=population.samples_per_s.sample(stream),
        memory_mib=population.memory_mib.sample(stream),
        down_bytes_per_s=population.down_bytes_per_s.sample(stream),
        up_bytes_per_s=population.up_bytes_per_s.sample(stream),
        latency_s=population.latency_s.sample(stream),
        compute_jitter=population.compute_jitter,
        link_jitter=population.link_jitter,
    )
