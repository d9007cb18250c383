"""litellm asks for a list of prices on the network when it is imported, unless told otherwise."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
