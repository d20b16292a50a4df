"""All planted faults. A new file of them is a line here."""

from tests.faults.faults_in_drift import FAULTS as IN_DRIFT
from tests.faults.faults_in_files import FAULTS as IN_FILES
from tests.faults.faults_in_mappings import FAULTS as IN_MAPPINGS
from tests.faults.faults_in_policy import FAULTS as IN_POLICY
from tests.faults.faults_in_quantized import FAULTS as IN_QUANTIZED
from tests.faults.faults_in_saves import FAULTS as IN_SAVES
from tests.faults.faults_in_sense import FAULTS as IN_SENSE
from tests.faults.faults_in_siblings import FAULTS as IN_SIBLINGS
from tests.faults.faults_in_structure import FAULTS as IN_STRUCTURE
from tests.faults.faults_in_the_folder import FAULTS as IN_FOLDER
from tests.faults.faults_in_weights import FAULTS as IN_WEIGHTS
from tests.faults.planting import Fault

FAULTS: tuple[Fault, ...] = (
    *IN_FILES,
    *IN_FOLDER,
    *IN_WEIGHTS,
    *IN_SIBLINGS,
    *IN_STRUCTURE,
    *IN_SENSE,
    *IN_DRIFT,
    *IN_QUANTIZED,
    *IN_SAVES,
    *IN_MAPPINGS,
    *IN_POLICY,
)
