"""The Trainium side: a model of the machine (`machine`), the megakernel written for it (`kernels`) and
conformance runs (`conformance`).
"""

__all__: list[str] = []
