"""What the rounds of a run share: settings, clients, the state, and what travels to clients."""

from collections.abc import Callable

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.server.aggregation import ServerState
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.server.round import MessageBuilder
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.simulated_time.clock import REAL, Clock
from ravan_flwr.training.model_and_data import ModelAndData


class Federation:
    """The parts of a run. Rounds change the state and the registry's records of nodes.

    Args:
        config: The run's configuration.
        loaded: The server's model and data. Every node must have the same fingerprints.
        start: The state, records and memory that the run begins with.
        privacy: The privacy budget of a private run.
        smallest_cohort: How many clients a round needs, of the run's partitions.
    """

    def __init__(
        self,
        config: Config,
        loaded: ModelAndData,
        start: ResumePoint,
        privacy: PrivacyBudget | None,
        smallest_cohort: Callable[[Config, int], int],
    ) -> None:
        self.config, self.loaded, self.method = config, loaded, loaded.model.method
        self.privacy = privacy
        if privacy is not None:
            privacy.restore(start.memory)
        partitions = start.records[-1]["partitions"] if start.records else None
        self.registry = ClientRegistry(config, loaded, partitions)
        self.sampler = Sampler(config, self.method, self.registry, smallest_cohort)
        self.state = ServerState(config, loaded.model.fingerprint, start.state, start.memory)
        self.message_builder = MessageBuilder(self.registry.nodes, start.fixed)
        self.trained = start.trained  # partitions that hold personal parameters
        self.clock: Clock = REAL
        self.began = 0.0  # the clock's time when the run began

    @property
    def time(self) -> float:
        """Return the seconds that the run has taken so far."""
        return self.clock.now - self.began

    def steps(self, client: RegisteredClient) -> int:
        """Return a client's local steps in a round; 0 if there are no trainable parameters."""
        if not self.method.trainable_parameters() and CLASSIFIER not in self.state.tensors:
            return 0
        return self.config.count_steps(self.registry.examples(client))

    def weight(self, client: RegisteredClient) -> float:
        """Return the weight of a client's update in a mean."""
        by_examples = self.config.weighting == "examples"
        return float(self.registry.examples(client)) if by_examples else 1.0
