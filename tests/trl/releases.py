"""What the installed releases can do."""

import transformers
import trl
from packaging.version import Version

#: Images need TRL 1.11, and processors without torchvision transformers 5.
HAS_IMAGES = Version(trl.__version__) >= Version("1.11") and Version(transformers.__version__) >= Version("5.6")
