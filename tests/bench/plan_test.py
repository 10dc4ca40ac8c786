"""Checks what the bench runs: its rows, and what is tried of each."""
from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import pathlib
import tempfile

from absl.testing import absltest, flagsaver, parameterized

from fedjax_ssl import config, methods
from fedjax_ssl.bench import plan
from fedjax_ssl.cli import train
from fedjax_ssl.core import registry
from fedjax_ssl.methods import uda
from fedjax_ssl.running import dealing, runs, settings
from fedjax_ssl.testing import toy

BEDS, ENTRIES = plan.beds(), plan.entries()
FLAGS = train.FLAGS
# Rows that are of use where few clients hold the labels, and nowhere else.
FEW_HOLD = {name: raw['beds'] for name, raw in plan._toml(
    'entries.toml').items() if 'beds' in raw}


class BedTest(parameterized.TestCase):
  """Beds are settings with flags that there are."""

  @parameterized.parameters(
      ('clients', '1079007a485ccd08'), ('server', 'b2a4e0d2d7de4935'),
      ('mixed', '8e055c45949fd81c'), ('agents', '7a9513daac2bd71d'))
  def test_frozen(self, name, wanted):
    """Stored results are of these runs; other numbers are another version."""
    bed = BEDS[name]
    runs = [plan.final_run(ENTRIES['fixmatch'], bed, skew,
                           plan.Configuration(0, bed.rates[0], {}))
            for skew in bed.skews]
    draws = [(c.learning_rate, *c.knobs.values())
             for c in plan.configurations(ENTRIES['fixmatch'], bed)]
    digest = hashlib.sha256(repr((bed.rates, runs, draws)).encode()).hexdigest()
    self.assertEqual(digest[:16], wanted)

  @parameterized.named_parameters((name, bed) for name, bed in BEDS.items())
  def test_flags(self, bed):
    self.assertIn(bed.setting, settings.SETTINGS)
    known = config.OPTIONS
    for skew in bed.skews.values():
      setting = settings.SETTINGS[skew.get('setting', bed.setting)]
      self.assertLessEqual({*bed.flags, *skew} & {*dealing.SKEWS},
                           dealing.reads(setting.deal))
      self.assertLessEqual({*bed.flags, *skew} - {'setting'}, {*known})
    self.assertLen(set(bed.rates), len(bed.rates))

  @parameterized.named_parameters((name, bed) for name, bed in BEDS.items())
  def test_search_is_one_seed_of_the_first_skew(self, bed):
    first, *others = bed.skews.values()
    self.assertNotEmpty(others)
    run = plan.search_run(ENTRIES['fixmatch'], bed,
                          plan.Configuration(0, bed.rates[0], {}))
    self.assertEqual(run.setting, first.get('setting', bed.setting))
    self.assertContainsSubset(
        {f'--{flag}={value}' for flag, value in first.items()
         if flag != 'setting'}, run.flags)
    self.assertIn(f'--seeds={plan.SEARCH_SEED}', run.flags)

  @parameterized.named_parameters((name, bed) for name, bed in BEDS.items())
  def test_every_run_can_start(self, bed):
    """The program reads its flags, and its method may be given such knobs."""
    task = toy.task(labels_at=bed.flags.get('labels_at', 'clients'))
    first = plan.Configuration(0, bed.rates[0], {})
    for entry in ENTRIES.values():
      if bed.name not in entry.beds:
        continue
      for configuration in plan.configurations(entry, bed):
        methods.make(plan.method_of(entry, configuration), task)
      for run in [plan.search_run(entry, bed, first), *(
          plan.final_run(entry, bed, skew, first) for skew in bed.skews)]:
        setting = settings.SETTINGS[run.setting]
        with flagsaver.flagsaver():
          for flag, value in setting.defaults.items():
            FLAGS.set_default(flag, value)
          FLAGS(['script', *run.flags])
          runs.check_read(setting, train.options())


class EntryTest(parameterized.TestCase):
  """Rows are methods with knobs that there are."""

  def test_every_method(self):
    """All but the bound itself and a client for itself have a row."""
    names = {registry.parse(entry.method)[0] for entry in ENTRIES.values()}
    self.assertEqual(names, {*methods.METHODS} - {'local'})

  @parameterized.named_parameters((n, entry) for n, entry in ENTRIES.items())
  def test_knobs(self, entry):
    name, given = registry.parse(entry.method)
    knobs = inspect.signature(methods.METHODS[name]).parameters
    self.assertLessEqual({*entry.knobs, *given}, {*knobs})
    self.assertEmpty({*entry.knobs} & {*given})
    for knob, values in entry.knobs.items():
      self.assertLen(set(values), len(values))
      default = knobs[knob].default
      if default is not None:  # Else a profile has it.
        self.assertEqual(values[0], default, knob)
    self.assertLessEqual({*entry.beds}, {*BEDS})
    self.assertIn(entry.of, ['', *ENTRIES])


  @parameterized.named_parameters((n, entry) for n, entry in ENTRIES.items())
  def test_clients_count_the_same(self, entry):
    """Where the method's default would count their rows."""
    name, given = registry.parse(entry.method)
    knob = inspect.signature(methods.METHODS[name]).parameters.get('weighting')
    if knob is not None and knob.default == 'examples':
      self.assertEqual(given.get('weighting'), 'uniform')
    self.assertNotIn('weighting', entry.knobs)


  @parameterized.named_parameters((n, entry) for n, entry in ENTRIES.items())
  def test_beds_are_those_that_the_method_takes(self, entry):
    for name, bed in BEDS.items():
      task = toy.task(labels_at=bed.flags.get('labels_at', 'clients'))
      if name in entry.beds:
        methods.make(entry.method, task)
      elif entry.name == 'fedrgd_code':
        self.assertEqual(name, 'server')  # Where it is the row of `fedrgd`.
      elif entry.name not in FEW_HOLD:
        with self.assertRaisesRegex(ValueError, 'labels_at'):
          methods.make(entry.method, task)


  def test_clients_with_labels_count_more_where_they_are_few(self):
    """Six times as much in one row of a pair, and alike in the other."""
    def factor(entry):
      name, given = registry.parse(entry.method)
      knobs = inspect.signature(methods.METHODS[name]).parameters
      return given.get('labeled_client_weight',
                       knobs['labeled_client_weight'].default)
    for name in FEW_HOLD:
      entry = ENTRIES[name]
      self.assertCountEqual(
          [factor(entry), factor(ENTRIES[entry.of])], [1, 6])
      self.assertEqual([*entry.beds], FEW_HOLD[name])
      of = ENTRIES[entry.of].knobs
      self.assertEqual([*entry.knobs], [*of])
      for knob, values in of.items():  # One has a value more.
        self.assertContainsSubset(values, entry.knobs[knob])


class ConfigurationTest(parameterized.TestCase):
  """Configurations are few, different, and the same everywhere."""

  @parameterized.named_parameters((n, entry) for n, entry in ENTRIES.items())
  def test_drawn(self, entry):
    bed = BEDS['clients']
    found = plan.configurations(entry, bed)
    choices = math.prod(map(len, (bed.rates, *entry.knobs.values())))
    self.assertLen(found, min(plan.CONFIGURATIONS, choices))
    self.assertEqual(found, plan.configurations(entry, bed))
    self.assertEqual(found[:3], plan.configurations(entry, bed, 3))
    self.assertEqual((found[0].learning_rate, found[0].knobs),
                     (bed.rates[0], {}))
    defaults = {knob: values[0] for knob, values in entry.knobs.items()}
    seen = {(c.learning_rate, *{**defaults, **c.knobs}.values()) for c in found}
    self.assertLen(seen, len(found))
    for configuration in found:
      self.assertIn(configuration.learning_rate, bed.rates)
      for knob, value in configuration.knobs.items():
        self.assertIn(value, entry.knobs[knob])

  def test_groups_share_the_cohort(self):
    """So that no more clients train in a round than in the other rows."""
    for name, size in (('clients', 2), ('agents', 3)):
      for entry in (ENTRIES['rscfed'], plan.own_entry('rscfed(beta=9.0)')):
        run = plan.search_run(entry, BEDS[name],
                              plan.Configuration(0, .02, {}))
        self.assertIn(f'--cohort_size={size}', run.flags)
        self.assertEqual(plan.space(entry, BEDS[name])['flags'],
                         {'cohort_size': size})

  def test_few_choices(self):
    """Where there are fewer choices than that, each is taken once."""
    entry = plan.own_entry('fixmatch(threshold=0.9)')
    bed = BEDS['clients']
    found = plan.configurations(entry, bed)
    self.assertCountEqual([c.learning_rate for c in found], bed.rates)

  def test_rows_draw_the_same_of_what_they_share(self):
    """Whatever their defaults and their other knobs are."""
    bed = BEDS['clients']
    shared = [[(c.learning_rate, c.knobs['threshold'],
                c.knobs['unlabeled_weight'])
               for c in plan.configurations(ENTRIES[name], bed)[1:]]
              for name in ('fixmatch', 'adamatch', 'sage', 'proxyfl')]
    for other in shared[1:]:
      self.assertEqual(other, shared[0])
    # Each value comes once before any comes again.
    rates, thresholds, weights = zip(*shared[0], strict=True)
    self.assertCountEqual(rates[:4], bed.rates)
    self.assertLen({*thresholds[:4]}, 4)
    self.assertLen({*weights[:3]}, 3)
    small = [drawn for drawn in shared[0] if drawn[0] <= .01]
    self.assertLen({drawn[1] for drawn in small}, 4)
    self.assertLen({drawn[2] for drawn in small}, 3)

  def test_method_of(self):
    entry = ENTRIES['uda_annealed']._replace(method="uda(profile='fedmatch')")
    self.assertEqual(
        plan.method_of(entry, plan.Configuration(1, .1, {'tsa': 'log'})),
        "uda(profile='fedmatch', tsa='log')")
    self.assertEqual(plan.method_of(
        ENTRIES['fixmatch'], plan.Configuration(0, .1, {})),
                     "fixmatch(weighting='uniform')")

  def test_seeds_of_search_are_not_counted(self):
    self.assertNotIn(plan.SEARCH_SEED, plan.SEEDS)
    self.assertLessEqual(plan.SEARCH_SEED, config.LARGEST_SEED)


class ChosenTest(absltest.TestCase):
  """Rows that are asked for come with both bounds."""

  def test_bounds_first(self):
    found = [e.name for e in plan.chosen(['uda'], BEDS['clients'])]
    self.assertEqual(found, [plan.FEW, plan.ALL, 'uda'])

  def test_own(self):
    found = plan.chosen(['fixmatch(threshold=0.9)'], BEDS['clients'])[-1]
    self.assertEqual(found.method, 'fixmatch(threshold=0.9)')

  def test_one_spelling(self):
    """Equal knobs are one row, however they are written."""
    first, second = (plan.own_entry(text) for text in (
        'fixmatch(threshold=.9,mu=1)', ' fixmatch( threshold=0.90, mu=1 )'))
    self.assertEqual(first, second)
    self.assertEqual(first.method, 'fixmatch(threshold=0.9, mu=1)')
    self.assertEqual(first.name, 'fixmatch_threshold=0.9_mu=1')

  def test_no_name_has_what_ends_it_in_those_of_its_runs(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (folder / 'm.py').touch()
    entry = plan.own_entry(f'{folder}/m.py:my__method(k__x=2)')
    self.assertEqual(entry.name, 'my_method_k_x=2')
    self.assertTrue(entry.method.endswith('m.py:my__method(k__x=2)'))

  def test_a_module(self):
    """It keeps its name, and its code is known."""
    entry = plan.own_entry('fedjax_ssl.methods.uda:uda(threshold=.5)')
    self.assertEqual(entry.name, 'uda_threshold=0.5')
    space = plan.space(entry, BEDS['clients'])
    self.assertEqual(space['method'],
                     'fedjax_ssl.methods.uda:uda(threshold=0.5)')
    self.assertEqual(space['code'], hashlib.sha256(
        pathlib.Path(uda.__file__).read_bytes()).hexdigest())

  def test_lists_of_values_are_tuned(self):
    """The first is the default, whatever the method's own is."""
    bed = BEDS['clients']
    entry = plan.own_entry("fixmatch(mu=1, threshold=[0.5, 0.9], ramp=['a'])")
    self.assertEqual(entry.method,
                     "fixmatch(mu=1, threshold=0.5, ramp='a')")
    self.assertEqual(entry.knobs, {'threshold': (0.5, 0.9), 'ramp': ('a',)})
    self.assertEqual(entry.name, 'fixmatch_mu=1_threshold=0.5_0.9_ramp=_a')
    tried = plan.configurations(entry, bed, 100)
    self.assertLen({plan.search_run(entry, bed, c).flags for c in tried},
                   2 * len(bed.rates))
    self.assertEqual({plan.method_of(entry, c) for c in tried}, {
        f"fixmatch(mu=1, threshold={value}, ramp='a')"
        for value in (0.5, 0.9)})
    self.assertEqual(plan.method_of(entry, tried[0]), entry.method)
    self.assertEqual(plan.from_space(entry.name, json.loads(json.dumps(
        plan.space(entry, bed)))).knobs, entry.knobs)

  def test_lists_that_leave_no_choice(self):
    """Equal values would be drawn for ever."""
    for values in ('[]', '[1, 1.0]', '[True, 1]', '[[1], [2]]', '[(1,)]'):
      with self.assertRaisesRegex(ValueError, 'must list different'):
        plan.own_entry(f'fixmatch(threshold={values})')

  def test_unknown(self):
    with self.assertRaisesRegex(ValueError, "Did you mean 'fixmatch'"):
      plan.chosen(['fixmach'], BEDS['clients'])
    with self.assertRaisesRegex(ValueError, 'not of the form'):
      plan.chosen(['fixmatch(1'], BEDS['clients'])

  def test_a_file(self):
    """Any folder can run it, and no name has its path."""
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (folder / 'mine.py').touch()
    with contextlib.chdir(folder):
      entry = plan.chosen(['./mine.py:own(weight=2)'], BEDS['clients'])[-1]
    self.assertEqual(entry.name, 'own_weight=2')
    self.assertEqual(
        plan.method_of(entry, plan.Configuration(0, .1, {})),
        f'{folder.resolve()}/mine.py:own(weight=2)')
    with self.assertRaisesRegex(ValueError, 'there is no file'):
      plan.chosen([f'{folder}/other.py:own'], BEDS['clients'])


if __name__ == '__main__':
  absltest.main()
