"""The paper's algorithm to the letter, one row at a time: the oracle of the closed form.

Appendix B with the reading that its main text asks for: both the activations and the target are centred, and the
update is added to the activation, so that a layer keeps its mean. It sorts in every iteration. Where values are equal
the paper does not say which comes first; here they share the mean of their targets.
"""

from __future__ import annotations

import numpy as np


def correct_row(a, t, *, lambda1, lambda2, iterations, location, sparse):
    """`a` and ascending `t` are float64 vectors of one length."""
    if location == "keep":
        kept_mean = a.mean()
        a_centred, t = a - kept_mean, t - t.mean()
    else:
        kept_mean, a_centred = 0.0, a
    a_tilde = a_centred.copy()
    for _ in range(iterations):
        order = np.argsort(a_tilde, kind="stable")
        t_of = np.empty_like(t)
        for i, j in enumerate(order):
            t_of[j] = t[i]
        for value in np.unique(a):
            equal = a == value
            t_of[equal] = t_of[equal].mean()
        a_tilde = a_tilde + lambda1 * (t_of - a_tilde)  # towards the prior
        a_tilde = a_tilde + lambda2 * (a_centred - a_tilde)  # back towards the data
    corrected = a_tilde + kept_mean
    if sparse:
        corrected[a == 0] = 0.0
    return corrected
