"""Numbers in tables are those of the rows."""
import matplotlib.image
import numpy as np
import pytest

from fedjax_ssl.report import canvas, summary, tradeoff
from fedjax_ssl.training import metrics


def rows(accuracies, validation=None, **more):
  result = []
  for i, accuracy in enumerate(accuracies):
    row = {'round': 10 * i, 'accuracy': accuracy, 'loss': 1.0 - (accuracy or 0)}
    if validation is not None:
      row['val_accuracy'] = validation[i]
    result.append(row | more)
  return result


def test_summary_of_one_seed():
  got = summary.summary(
      rows([0.1, 0.6, 0.4, 0.5, 0.2, 0.3],
           [0.2, 0.3, 0.7, 0.7, 0.1, 0.1], bytes_up=5))
  assert got == {
      'round': 50, 'final': 0.3, 'tail': pytest.approx(0.4),
      'selected': 0.4, 'best': 0.6, 'bytes_up': 30, 'verdict': None}


def test_what_was_not_measured_is_none():
  got = summary.summary(rows([None, None]))
  assert got['final'] is got['best'] is got['selected'] is None
  assert summary.summary(rows([0.5]))['selected'] is None


def test_selection_is_the_test_accuracy_of_the_best_validated_round():
  rng = np.random.default_rng(0)
  for _ in range(20):
    test, validation = rng.random((2, 9))
    got = summary.summary(rows(test, validation))
    assert got['selected'] == pytest.approx(test[validation.argmax()])
  # Of rounds that are as good the first, and none without a test.
  for validation, want in (([.1, .9, .9, .2], .6), ([.9, .1, .2, .3], .4)):
    got = summary.summary(rows([None, .6, .3, .4], validation))
    assert got['selected'] == want


def test_no_rows_are_refused():
  with pytest.raises(ValueError, match='nothing was measured'):
    summary.summary([])


def test_every_number_is_shown_and_those_in_doubt_are_marked():
  ten = {'per_class_accuracy': [0.1] * 10}
  text = summary.table({
      'good': [rows([0.9], **ten)], 'look': [rows([0.1, 0.14], **ten)],
      'half': [rows([0.9], **ten), rows([0.1], **ten)],
      'lost': [rows([0.4], **ten | {'largest_weight': 3e9})] * 2})
  _, _, good, look, half, lost, _, *notes = text.splitlines()
  cells = [[c.strip() for c in line.strip('|').split('|')]
           for line in (good, look, half, lost)]
  assert [c[3] for c in cells] == [
      '90.00', '14.00 ‡', '50.00 ± 56.57 ‡', '40.00 ± 0.00 †']
  assert [n for n in notes if n] == [
      'look: ‡ less than 5.00 points above the largest class (10.00 %).',
      'half: ‡ less than 5.00 points above the largest class (10.00 %) in 1 of '
      '2 seeds.', 'lost: † diverged in 2 of 2 seeds: largest weight 3e+09.']
  assert '‡' not in summary.table({'good': [rows([0.9], **ten)]})


def test_columns_on_request_are_of_the_last_row():
  runs = {'a': [rows([0.5, 0.6], macro_recall=0.25, loss_of=2.0),
                rows([0.5, 0.6], macro_recall=0.35, loss_of=4.0)],
          'b': [rows([0.5])]}
  columns = 'macro_recall', 'loss_of'
  summary.check_columns(columns, runs)
  cells = [[summary.mean_std([summary.last(seed, name) for seed in seeds])
            for name in columns] for seeds in runs.values()]
  assert cells == [['30.00 ± 7.07', '3.00 ± 1.41'], ['-', '-']]
  with pytest.raises(ValueError, match='columns=auc: .*macro_recall'):
    summary.check_columns(['auc'], runs)


def test_epsilon_is_in_the_table_where_it_was_spent():
  text = summary.table({'a': [rows([0.5, 0.6], epsilon=3.25)],
                       'b': [rows([0.5])], 'c': [rows([0.5], epsilon=None)]})
  cells = [line.strip('|').split('|')[-1].strip()
           for line in text.splitlines()]
  assert cells[0] == 'epsilon' and cells[2:] == ['3.25', '', 'unbounded']


def test_an_epsilon_that_guarantees_nothing_says_so():
  runs = {name: [rows([0.5, 0.6], epsilon=3.25)] for name in ('a', 'b')}
  _, _, a, b, _, note = summary.table(runs, nominal=['b']).splitlines()
  assert a.endswith(' 3.25 |') and b.endswith('| 3.25, nominal |')
  assert note == summary.NOMINAL and note not in summary.table(runs)


def test_bands_stay_where_values_can_be():
  low, high = summary.band(np.array([[90., 5., -1.], [100., 0., 1.]]),
                           percent=True)
  assert high[0] == 100 and low[1] == 0 and low[2] < -1
  _, high = summary.band(np.array([[90.], [100.]]), percent=False)
  assert high[0] == pytest.approx(95 + 50**.5)


def test_accuracy_against_epsilon(tmp_path):
  spent = [{'round': i, 'accuracy': 0.1 * i, 'epsilon': e}
           for i, e in enumerate((0.5, 1.5, None))]
  x, y = tradeoff.path_of(spent)
  np.testing.assert_allclose(x, [0.5, 1.5])
  np.testing.assert_allclose(y, [0.0, 0.1])
  tradeoff.plot({'private': [spent], 'open': [rows([0.5])]},
                tmp_path / 'p.png')
  assert matplotlib.image.imread(tmp_path / 'p.png').std() > 0
  with pytest.raises(ValueError, match='epsilon'):
    tradeoff.plot({'open': [rows([0.5])]}, tmp_path / 'q.png')


def test_table_is_mean_and_sample_deviation():
  text = summary.table({'one': [rows([0.5])],
                       'two seeds': [rows([0.5]), rows([0.6])]})
  head, rule, one, two = text.splitlines()
  assert len({len(line) for line in (head, rule, one, two)}) == 1
  cells = [c.strip() for c in two.strip('|').split('|')]
  assert cells[:3] == ['two seeds', '2', '0']
  assert cells[3] == '55.00 ± 7.07'
  assert cells[5] == '-'  # Without validation nothing is selected by it.
  assert '50.00' in one and '±' not in one


def test_table_does_not_depend_on_the_order_of_seeds():
  seeds = [rows([0.1, a]) for a in (0.3, 0.5, 0.8)]
  assert summary.table({'m': seeds}) == summary.table({'m': seeds[::-1]})


def test_table_shows_unequal_lengths():
  text = summary.table({'m': [rows([0.1]), rows([0.1, 0.2])]})
  assert '0-10' in text


def test_load_splits_seeds_of_one_folder(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    for round_ in (0, 1):
      for seed in (4, 2):
        writer.write({'round': round_, 'seed': seed, 'accuracy': seed / 10})
  runs = summary.load({'m': [tmp_path]})
  assert [[r['seed'] for r in seed] for seed in runs['m']] == [[2, 2], [4, 4]]
  with pytest.raises(ValueError, match="missing.*'m'"):
    summary.load({'m': [tmp_path / 'missing']})


def test_curves_use_rounds_that_all_seeds_have():
  curve = summary.curve(
      [rows([0.1, 0.2, 0.3]), rows([0.5, None])], 'accuracy')
  assert curve is not None
  np.testing.assert_array_equal(curve[0], [0])
  np.testing.assert_array_equal(curve[1], [[0.1], [0.5]])
  assert summary.curve([rows([0.1])], 'epsilon') is None


def test_plot_shows_something(tmp_path):
  runs = {f'm{i}': [rows([0.1, 0.2 + i / 20]), rows([0.1, 0.3])]
          for i in range(9)}
  canvas.write(summary.curves(runs, panels=('accuracy', 'loss', 'epsilon')),
               tmp_path / 'new' / 'curves.png')
  image = matplotlib.image.imread(tmp_path / 'new' / 'curves.png')
  colours = np.unique(image.reshape(-1, image.shape[-1]), axis=0)
  assert image.shape[1] > image.shape[0] and len(colours) > 50


def test_plot_of_nothing_is_refused():
  with pytest.raises(ValueError, match='epsilon'):
    summary.curves({'m': [rows([0.5])]}, panels=('epsilon',))


def test_a_chart_is_written_whole_or_not_at_all(tmp_path):
  chart = summary.curves({'m': [rows([0.1, 0.5])]}, panels=('accuracy',))
  file = tmp_path / 'c.svg'
  canvas.write(chart, file)
  before = file.read_bytes()
  for name in ('', '.', 'curves', '.png', 'c.no_format'):
    with pytest.raises(ValueError, match='must end with .png, .pdf or .svg'):
      canvas.write(chart, tmp_path / name)
  with pytest.raises(ValueError, match='inside.svg cannot be'):
    canvas.write(chart, file / 'inside.svg')
  assert file.read_bytes() == before
  assert [path.name for path in tmp_path.iterdir()] == ['c.svg']


def test_no_two_of_28_lines_look_alike():
  assert len({canvas.look(number) for number in range(28)}) == 28


def test_names_are_no_formulas(tmp_path):
  """A folder may be called so; its legend says it, letter by letter."""
  rows = [{'round': r, 'accuracy': .5, 'epsilon': float(r)} for r in (1, 2)]
  runs = {'$x^{$': [rows], 'a $\\frac{1}$ b': [rows]}
  canvas.write(summary.curves(runs), tmp_path / 'a.png')
  tradeoff.plot(runs, tmp_path / 'b.png')
  for name in 'ab':
    assert (tmp_path / f'{name}.png').stat().st_size > 1000
