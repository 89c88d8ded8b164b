import pytest
import yaml

from integrations.diffusion_nft.config import CONFIGS, Config, UserError, load_config, resolve_path
from tests.integrations.diffusion_nft.miniature import settings


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path)), encoding="utf-8")
    return path


def message(file, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        load_config(str(file), list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_shipped_configs_are_valid(name):
    config = load_config(name)
    for file in (*config.prompts.train, *config.prompts.held_out):
        assert resolve_path(file).is_file()


def test_overrides_reach_into_sections_and_are_yaml(file):
    config = load_config(
        str(file),
        [
            "seed=7",
            "optimizer.lr=1e-5",
            "loss.train_timesteps=null",
            "rewards=[darkness]",
            "balance.options={floor: 0.1}",
        ],
    )
    assert (config.seed, config.optimizer.lr, config.loss.train_timesteps) == (7, 1e-5, None)
    assert config.rewards == ["darkness"]
    assert config.balance.options == {"floor": 0.1}


def test_a_section_that_the_file_lacks_can_be_overridden(file):
    assert load_config(str(file), ["averages.old_decay='2'"]).averages.old_decay == "2"


def test_written_config_reads_back_equal(file, tmp_path):
    config = load_config(str(file), ["loss.beta=0.3"])
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(str(again)) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("sed=1", ["unknown key 'sed'", "did you mean 'seed'"]),
        ("optimizer.learning=1", ["unknown key 'optimizer.learning'", "known here", "lr"]),
        ("loss.betta=1", ["unknown key 'loss.betta'", "did you mean 'loss.beta'"]),
        ("steps=0", ["steps=0", "greater than or equal to 1"]),
        ("steps=many", ["steps='many'", "valid integer"]),
        ("rollout.sampler=ddim", ["rollout.sampler='ddim'", "'euler'"]),
        ("steps", ["'steps'", "not key=value"]),
        ("=3", ["not key=value"]),
        ("seed.x=1", ["'seed' is a single value"]),
        ("seed=[1", ["not YAML"]),
        ("reward_scale={redness: 0}", ["reward_scale.redness=0", "greater than 0"]),
        ("reward_scale={redness: .inf}", ["reward_scale.redness=inf", "finite"]),
        ("reward_scale={blueness: 2}", ["yaml: reward_scale names 'blueness'", "redness, darkness"]),
        ("prompts.shares=[1, 0]", ["prompts.shares.1=0", "greater than or equal to 1"]),
    ],
)
def test_wrong_overrides_are_named_in_one_line(file, override, parts):
    text = message(file, override)
    assert all(part in text for part in parts), text


def test_several_problems_are_counted(file):
    assert "(and 1 more)" in message(file, "steps=0", "save_every=0")


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text("pipeline: tiny\nprompts: {train: [a], held_out: [b]}\nrewards: [r]\n", encoding="utf-8")
    assert "'steps' is missing" in message(path)


@pytest.mark.parametrize(("text", "part"), [("- a\n", "must hold settings"), ("a: [", "not readable YAML")])
def test_a_file_that_is_no_config_is_named(tmp_path, text, part):
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    assert part in message(path)


def test_an_unknown_config_names_the_nearest():
    assert "did you mean 'tiny'" in message("tinny")


def test_configs_are_frozen(file):
    config = load_config(str(file))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1
    assert isinstance(config, Config)


def test_a_missing_file_says_where_it_was_looked_for():
    with pytest.raises(UserError, match=r"nowhere\.txt not found \(looked in"):
        resolve_path("nowhere.txt")
