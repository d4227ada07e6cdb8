"""The laboratory of trueup: data sets, corruptions, source models, training, evaluation, rivals and experiments.

It imports the library and is never imported by it.
"""

__version__ = "0.2.0"
