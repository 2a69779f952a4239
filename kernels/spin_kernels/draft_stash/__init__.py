"""Keep the scores of drafts until the verdict."""

from spin_kernels.draft_stash.reference import draft_stash

__all__ = ["draft_stash"]
