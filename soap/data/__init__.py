"""Training data that commands of this package have made."""

from soap.data.preprocessed import Preprocessed

__all__ = ["Preprocessed"]
