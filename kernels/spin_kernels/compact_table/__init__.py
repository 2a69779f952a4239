"""List the pages of the planned blocks."""

from spin_kernels.compact_table.reference import compact_table

__all__ = ["compact_table"]
