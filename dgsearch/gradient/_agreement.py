"""The agreement of the source domains' gradients on one batch."""

from torch import Tensor

from dgsearch.step import Step, cosines, domain_gradients


def domain_agreement(step: Step) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Return the domains' task losses [D], the cosines of their gradients [D(D−1)/2], and those gradients.

    With this step's dropout masks, and no buffer moved; batch norm in training mode normalises each domain by
    itself.
    """
    with step.closure.masks():
        losses, gradients = domain_gradients(step.model, step.objective, step.batch, step.progress)
    return losses, cosines(gradients), gradients
