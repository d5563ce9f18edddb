# SPDX-License-Identifier: Apache-2.0
"""The loss of every preset as in its paper: float64, sequence after sequence, without imports from the package.

A loss is a function of `x`, log-probs of the current policy `[N, T]`, for `N` perturbations at once. Terms with a
stop-gradient are computed from `d.x`, which is not perturbed. The loss is minus the sum of the objective over valid
tokens, without a denominator.
"""

import math
import struct
from dataclasses import dataclass

import torch


@dataclass
class Data:
    """Log-probs of four policies `[T]`, advantages, and the valid tokens of each sequence in order."""

    x: torch.Tensor
    behavior: torch.Tensor
    proximal: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    sequences: list[torch.Tensor]
    values: torch.Tensor | None = None

    @property
    def valid(self):
        return torch.cat(self.sequences)

    def spread(self, function, values):
        """The result of `function` for the values of each sequence, at each of its tokens."""
        out = torch.zeros_like(values)
        for tokens in self.sequences:
            out[..., tokens] = function(values[..., tokens]).unsqueeze(-1)
        return out

    def prefix(self, values):
        out = torch.zeros_like(values)
        for tokens in self.sequences:
            out[..., tokens] = values[..., tokens].cumsum(-1)
        return out

    def total(self, objective):
        return -objective[..., self.valid].sum(-1)


def clip_objective(ratio, a, low, high):
    return torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def rho(d):
    return (d.proximal - d.behavior).exp()


def omega(d):
    return (d.x - d.behavior).exp()


def ppo_objective(x, d, low=0.2, high=0.2):
    return clip_objective((x - d.proximal).exp(), d.advantages, 1 - low, 1 + high)


def ppo(x, d, low, high):
    return d.total(ppo_objective(x, d, low, high))


dapo = ppo


def dual_clip(x, d, low, high, dual):
    inner = ppo_objective(x, d, low, high)
    return d.total(torch.where(d.advantages < 0, torch.maximum(inner, dual * d.advantages), inner))


def bypass(x, d, low, high):
    return d.total(clip_objective((x - d.behavior).exp(), d.advantages, 1 - low, 1 + high))


def kimi_k2_5(x, d, low, high, tau):
    log_ratio = x - d.behavior
    return d.total(log_ratio.exp().clamp(low, high) * d.advantages - tau * log_ratio.square())


def dcpo(x, d, low, high, cap):
    q = d.proximal.exp()
    lower = 0.5 + 0.5 * (1 - 4 * low / q).clamp_min(0).sqrt()
    upper = (0.5 + 0.5 * (1 + 4 * high / q).sqrt()).clamp_max(cap)
    ratio = (x - d.proximal).exp()
    clipped = torch.maximum(torch.minimum(ratio, upper), lower)
    return d.total(torch.minimum(ratio * d.advantages, clipped * d.advantages))


def weighted_ppo(x, d, weight):
    return d.total(weight * ppo_objective(x, d))


def decoupled(x, d):
    return weighted_ppo(x, d, rho(d))


def decoupled_token_tis(x, d, high):
    return weighted_ppo(x, d, rho(d).clamp_max(high))


def decoupled_sequence_tis(x, d, high):
    return weighted_ppo(x, d, d.spread(lambda v: v.prod(-1), rho(d)).clamp_max(high))


def decoupled_token_clip(x, d, low, high):
    return weighted_ppo(x, d, rho(d).clamp(low, high))


def decoupled_tempered(x, d, power):
    return weighted_ppo(x, d, rho(d) ** power)


def decoupled_mixed(x, d, mix):
    return weighted_ppo(x, d, (1 - mix) + mix * rho(d))


def inside(value, low, high):
    return ((value >= low) & (value <= high)).double()


def token_mis(x, d, low, high):
    return weighted_ppo(x, d, rho(d) * inside(rho(d), low, high))


def icepop(x, d, low, high, normalize_over):
    weight = rho(d) * inside(rho(d), low, high)
    mean = {None: 1.0, "all_tokens": weight[d.valid].mean()}[normalize_over]
    return weighted_ppo(x, d, weight / mean)


def glm_5_reasoning(x, d, beta, low, high):
    return d.total(rho(d) * inside(rho(d), 1 / beta, beta) * ppo_objective(x, d, low, high))


def product(d, ratio):
    return d.spread(lambda v: v.prod(-1), ratio)


def geometric(d, ratio):
    return d.spread(lambda v: v.prod(-1) ** (1 / v.shape[-1]), ratio)


def sequence_mis(x, d, low, high):
    w = product(d, rho(d))
    return weighted_ppo(x, d, w * inside(w, low, high))


def geometric_rs(x, d, low, high):
    return weighted_ppo(x, d, inside(geometric(d, rho(d)), low, high))


def segment_rs(x, d, low, high):
    weight = torch.zeros_like(d.x)
    for tokens in d.sequences:
        for segment in torch.tensor_split(tokens, (tokens.diff() > 1).nonzero().flatten() + 1):
            weight[segment] = inside((d.proximal - d.behavior)[segment].mean().exp(), low, high)
    return weighted_ppo(x, d, weight)


def geometric_rs_token_tis(x, d, low, high, bound):
    return weighted_ppo(x, d, rho(d).clamp_max(bound) * inside(geometric(d, rho(d)), low, high))


def sequence_mask_tis(x, d, low, high):
    return weighted_ppo(x, d, rho(d) * inside(geometric(d, rho(d)), low, high))


def veto(x, d, low):
    return weighted_ppo(x, d, inside(d.spread(lambda v: v.amin(-1), rho(d)), low, math.inf))


def trm(x, d, high_max, high_mean):
    k2 = rho(d).log().square() / 2
    k3 = rho(d) - 1 - rho(d).log()
    near = d.spread(lambda v: v.amax(-1), k2) <= high_max
    small = d.spread(lambda v: v.mean(-1), k3) <= high_mean
    return weighted_ppo(x, d, (near & small).double())


def sequence_error(x, d, high):
    error = torch.maximum(rho(d), 1 / rho(d))
    return weighted_ppo(x, d, inside(d.spread(lambda v: v.mean(-1), error), 0, high))


def score(x, d, weight=1.0):
    return d.total(weight * d.advantages * x)


def reinforce(x, d):
    return score(x, d)


def reinforce_token_is(x, d):
    # Also as a ratio with gradient: the same coefficient.
    return d.total((x - d.behavior).exp() * d.advantages)


def dro(x, d, beta):
    return d.total(d.advantages * x - beta / 2 * (x - d.behavior).square())


def aipo(x, d, high):
    return score(x, d, omega(d).clamp_max(high))


def reinforce_sequence_tis(x, d, high):
    return score(x, d, product(d, omega(d)).clamp_max(high))


def reinforce_sequence_snis(x, d):
    w = product(d, omega(d))
    mean = torch.stack([w[tokens[0]] for tokens in d.sequences]).mean()
    return score(x, d, w / mean)


def psis(weights: list[float]) -> tuple[list[float], float]:
    """Algorithm 1 of arXiv:1507.02646 with the fit of Zhang and Stephens, as the paper's appendix has it."""
    n = len(weights)
    m = math.ceil(min(n / 5, 3 * math.sqrt(n)))
    order = sorted(range(n), key=lambda i: weights[i])
    tail, cutoff = order[n - m :], weights[order[n - m - 1]]
    x = [weights[i] - cutoff for i in tail]
    grid = 30 + math.floor(math.sqrt(m))
    quarter = x[math.floor(m / 4 + 0.5) - 1]
    theta = [1 / x[-1] + (1 - math.sqrt(grid / (j - 0.5))) / (3 * quarter) for j in range(1, grid + 1)]

    def shape(t):
        return sum(math.log1p(-t * v) for v in x) / m

    likelihood = [m * (math.log(-t / shape(t)) - shape(t) - 1) for t in theta]
    share = [1 / sum(math.exp(min(other - one, 700)) for other in likelihood) for one in likelihood]
    best = sum(t * s for t, s in zip(theta, share, strict=True))
    k = shape(best)
    scale = -k / best
    k = (k * m + 10 * 0.5) / (m + 10)
    out = list(weights)
    for z, i in enumerate(tail, start=1):
        quantile = cutoff + scale / k * ((1 - (z - 0.5) / m) ** -k - 1)
        out[i] = min(quantile, max(weights))
    return out, k


def reinforce_sequence_psis(x, d, high):
    w = product(d, omega(d))
    smoothed, _ = psis([float(w[tokens[0]]) for tokens in d.sequences])
    for tokens, weight in zip(d.sequences, smoothed, strict=True):
        w[tokens] = min(weight, high)
    return score(x, d, w)


def cispo(x, d, low, high):
    return score(x, d, (d.x - d.proximal).exp().clamp(low, high))


def dispo(x, d, positive, negative):
    r = (d.x - d.proximal).exp()
    return score(x, d, torch.where(d.advantages > 0, r.clamp(*positive), r.clamp(*negative)))


def outward_outside(d, low, high):
    r = (d.x - d.proximal).exp()
    return ((d.advantages > 0) & (r > 1 + high)) | ((d.advantages < 0) & (r < 1 - low))


def minirl(x, d, low, high, cap):
    return score(x, d, omega(d).clamp_max(cap) * (~outward_outside(d, low, high)).double())


def topr(x, d, high):
    w = product(d, omega(d)).clamp(0, high)
    return score(x, d, torch.where(d.advantages > 0, torch.ones_like(w), w))


def aspo(x, d, low, high, cap):
    r = (d.x - d.proximal).exp()
    weight = torch.where(d.advantages > 0, (1 / r).clamp_max(cap), r)
    return score(x, d, weight * (~outward_outside(d, low, high)).double())


def ctpo(x, d, low, high, dual, power):
    log_ratio = d.prefix(d.x - d.proximal) + x - d.x
    scale = d.prefix(torch.ones_like(d.x)).clamp_min(1) ** power
    clipped = torch.maximum(torch.minimum(log_ratio, high * scale), -low * scale).exp()
    inner = torch.minimum(log_ratio.exp() * d.advantages, clipped * d.advantages)
    floor = (dual * scale).exp() * d.advantages
    return d.total(torch.where(d.advantages < 0, torch.maximum(inner, floor), inner))


def ratio_objective(x, d, mask=1.0):
    return mask * (x - d.behavior).exp() * d.advantages


def bernoulli_kl(p, q):
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def kpop(x, d, phi):
    p, q = d.x.exp(), d.behavior.exp()
    return d.total(ratio_objective(x, d, ((bernoulli_kl(p, q) <= phi) & (bernoulli_kl(q, p) <= phi)).double()))


def intellect_3(x, d, low, high, veto):
    worst = d.spread(lambda v: v.amin(-1), omega(d))
    return d.total(ratio_objective(x, d, inside(omega(d), low, high) * inside(worst, veto, math.inf)))


def mis_po(x, d, low, high, low_sequence, high_sequence):
    whole = geometric(d, omega(d))
    return score(x, d, inside(omega(d), low, high) * inside(whole, low_sequence, high_sequence))


def tv_mask(d, delta):
    gain = d.x.exp() - d.behavior.exp()
    return torch.where(d.advantages > 0, gain <= delta, gain >= -delta).double()


def dppo_tv(x, d, delta, cap):
    return score(x, d, omega(d).clamp_max(cap) * tv_mask(d, delta))


def dppo_kl(x, d, delta, cap):
    is_inward = d.advantages * (d.x - d.behavior) <= 0
    mask = (bernoulli_kl(d.behavior.exp(), d.x.exp()) <= delta) | is_inward
    return score(x, d, omega(d).clamp_max(cap) * mask.double())


def prime_rl(x, d, low, high, tau):
    gain = d.x.exp() - d.behavior.exp()
    mask = torch.where(d.advantages > 0, gain <= high, gain >= -low).double()
    return d.total(ratio_objective(x, d, mask) - tau * (x - d.behavior).square())


def ipo(x, d, delta, tau):
    mask = ((d.x.exp() - d.behavior.exp()).abs() <= delta).double()
    return d.total(ratio_objective(x, d, mask) - tau * (x - d.behavior).square())


def glm_5(x, d, low, high):
    return score(x, d, omega(d) * inside(omega(d), 1 - low, 1 + high))


def mimo_mopd(x, d, low, high):
    return score(x, d, omega(d) * inside(omega(d), low, high))


def opsm(x, d, delta):
    drift = d.spread(lambda v: v.mean(-1), d.behavior - d.x)
    return weighted_ppo(x, d, (~((d.advantages < 0) & (drift > delta))).double())


def gspo(x, d, low, high):
    s = d.spread(lambda v: v.mean(-1), x - d.proximal).exp()
    return d.total(clip_objective(s, d.advantages, 1 - low, 1 + high))


def gspo_token(x, d, low, high):
    s = (d.spread(lambda v: v.mean(-1), d.x - d.proximal) + x - d.x).exp()
    return d.total(clip_objective(s, d.advantages, 1 - low, 1 + high))


# The length of a sequence times the mean over its tokens is their sum.
luspo = gspo


def gmpo(x, d, low, high):
    log_ratio = x - d.proximal
    sign = d.advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(math.log(low), math.log(high)))
    return d.total(d.spread(lambda v: v.mean(-1), clipped).exp() * d.advantages)


def vespo(x, d, positive, negative):
    w = product(d, omega(d))

    def phi(shape, scale):
        return math.exp(scale) * w**shape * (-scale * w).exp()

    return score(x, d, torch.where(d.advantages > 0, phi(*positive), phi(*negative)))


def sapo(x, d, positive, negative):
    is_positive = (d.advantages > 0).double()
    tau = is_positive * positive + (1 - is_positive) * negative
    return d.total(4 / tau * torch.sigmoid(tau * ((x - d.proximal).exp() - 1)) * d.advantages)


def maspo(x, d, scale, power, high, positive, negative):
    r = (d.x - d.proximal).exp()
    q = d.proximal.exp()
    mass = (scale / q**power).clamp(scale, high)
    a = d.advantages
    sigma = mass * torch.where(a > 0, (1 + positive * a).clamp(0.1, 10), (1 / (1 - negative * a)).clamp(0.1, 10))
    outward = ((a > 0) & (r > 1)) | ((a < 0) & (r < 1))
    gate = torch.where(outward, (-((r - 1) ** 2) / 2 / sigma**2).exp(), torch.ones_like(r))
    return d.total(gate * (x - d.proximal).exp() * a)


def m2po(x, d, budget):
    squared = (d.x - d.behavior).square()
    harmful = [i for i in d.valid.tolist() if d.advantages[i] * (d.x[i] - d.behavior[i]) > 0]
    harmful.sort(key=lambda i: float(squared[i]))
    while harmful and sum(float(squared[i]) for i in harmful) / len(harmful) > budget:
        harmful.pop()
    mask = torch.tensor([i in harmful for i in range(len(squared))])
    return d.total(ratio_objective(x, d, (mask | (d.advantages * (d.x - d.behavior) <= 0)).double()))


def vaco(x, d, delta):
    exceeded = bool((omega(d)[d.valid] - 1).abs().mean() / 2 > delta)
    outward = d.advantages * (d.x - d.behavior) > 0
    return d.total(ratio_objective(x, d, (~(outward & torch.tensor(exceeded))).double()))


def p3o(x, d):
    w = omega(d)[d.valid]
    ess = w.sum() ** 2 / (len(w) * (w**2).sum())
    log_inverse = d.behavior - x
    return score(x, d, omega(d).clamp_max(ess)) - d.total((1 - ess) * (log_inverse.exp() - 1 - log_inverse))


def covariance(d):
    a, log_prob = d.advantages[d.valid], d.x[d.valid]
    return dict(zip(d.valid.tolist(), ((a - a.mean()) * (log_prob - log_prob.mean())).tolist(), strict=True))


def mixed(bits):
    """Mueller's hash of integers, twice."""
    bits &= 0x7FFFFFFF
    for _ in range(2):
        bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & 0x7FFFFFFF
    return (bits >> 16) ^ bits


def hashes(d, seed):
    """A random number for each valid token, from the float32 proximal log-probs of its sequence and its position."""
    found = {}
    for tokens in d.sequences:
        bits = [struct.unpack("<i", struct.pack("<f", float(v)))[0] for v in d.proximal[tokens]]
        places = [2654435761 * place for place in range(1, len(bits) + 1)]
        of_sequence = sum(mixed(mixed(b + seed * 7919) + place) for b, place in zip(bits, places, strict=True))
        of_sequence = mixed(mixed(of_sequence))
        found |= {t: mixed(mixed(of_sequence + place)) for t, place in zip(tokens.tolist(), places, strict=True)}
    return found


def clip_cov(x, d, low, high, cov_low, cov_high, share, seed):
    ratio, random = (d.x - d.proximal).exp(), hashes(d, seed)
    stopped = ((d.advantages > 0) & (ratio > 1 + high)) | ((d.advantages < 0) & (ratio < 1 - low))
    drawn = [t for t, c in covariance(d).items() if cov_low < c < cov_high and not stopped[t]]
    dropped = sorted(drawn, key=random.get)[: max(int(share * len(d.valid)), 1)]
    mask = torch.ones_like(d.x)
    mask[dropped] = 0.0
    return d.total(mask * ppo_objective(x, d, low, high))


def kl_cov(x, d, share, scale):
    of_token = covariance(d)
    chosen = sorted(of_token, key=of_token.get, reverse=True)[: max(int(share * len(of_token)), 1)]
    mask = torch.zeros_like(d.x)
    mask[chosen] = 1.0
    return d.total((x - d.proximal).exp() * d.advantages - scale * mask * (x - d.proximal).abs())


def grpo_k3(x, d, beta):
    log_inverse = d.reference - x
    return d.total(ppo_objective(x, d) - beta * (log_inverse.exp() - 1 - log_inverse))


def grpo_k2(x, d, beta):
    return d.total(ppo_objective(x, d) - beta * (x - d.reference).square() / 2)


def grpo_unbiased_kl(x, d, beta):
    log_inverse = d.reference - x
    importance = (x - d.behavior).exp()
    return d.total(ppo_objective(x, d) - beta * importance * (log_inverse.exp() - 1 - log_inverse))


def drift_control(x, d):
    return score(x, d) + d.total((omega(d) - 1) * d.values * x)
