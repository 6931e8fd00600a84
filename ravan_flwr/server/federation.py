"""What the rounds of a run share: settings, clients, the state, and what travels to clients."""

from dataclasses import dataclass, field

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import CLASSIFIER, Method
from ravan_flwr.server.aggregation import ServerState
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.round import MessageBuilder
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.simulated_time.clock import REAL, Clock
from ravan_flwr.training.model_and_data import ModelAndData


@dataclass
class Federation:
    """The parts of a run. Rounds change the state and the registry's records of nodes."""

    config: Config
    loaded: ModelAndData  # the server's model and data
    registry: ClientRegistry
    sampler: Sampler
    state: ServerState
    message_builder: MessageBuilder
    privacy: PrivacyBudget | None = None
    trained: set[int] = field(default_factory=set)  # partitions that hold personal parameters
    clock: Clock = REAL
    began: float = 0.0  # the clock's time when the run began

    @property
    def method(self) -> Method:
        """Return the method of the model."""
        return self.loaded.model.method

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
