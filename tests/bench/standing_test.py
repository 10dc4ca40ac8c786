"""Checks ranks, gaps and the worst clients against values made by hand."""
from __future__ import annotations

import json
import pathlib
import re
import tempfile
from typing import Any

from absl.testing import absltest
import numpy as np

from fedjax_ssl.bench import page, picture, plan, records, standing
from fedjax_ssl.core import run_files
from fedjax_ssl.report import clients
from fedjax_ssl.training import per_client

BED = plan.beds()['clients']


def measured(name, accuracy):
  """A row with given accuracies of its seeds."""
  entry = plan.Entry(name, 'fixmatch', {}, {}, (), '')
  return standing.Measured(
      entry, plan.Configuration(0, .1, {}), np.array(accuracy), (1, 2),
      np.array([[.1, .6]] * len(accuracy)), np.array(accuracy),
      None, None, None, None, ())


class CompareTest(absltest.TestCase):
  """Rows between the bounds and among each other."""

  def test_gap(self):
    lines = {line.measured.entry.name: line for line in standing.compare([
        measured(plan.FEW, [.5, .5]), measured(plan.ALL, [.9, .9]),
        measured('a', [.6, .8])])}
    self.assertAlmostEqual(lines['a'].gap or 0, .5)
    self.assertEqual(lines[plan.FEW].gap, 0)
    self.assertEqual(lines[plan.ALL].gap, 1)
    self.assertEqual(lines['a'].reached, 2)
    self.assertIsNone(lines[plan.ALL].rank)

  def test_reached_is_as_high_as_labels_only(self):
    """Curves end at .6, in round 2."""
    for few, round_ in ((.59, 2), (.6, 2), (.61, None)):
      lines = {line.measured.entry.name: line for line in standing.compare([
          measured(plan.FEW, [few]), measured('a', [.6])])}
      self.assertEqual(lines['a'].reached, round_)

  def test_no_gap_where_bounds_are_upside_down(self):
    lines = standing.compare([measured(plan.FEW, [.9]),
                              measured(plan.ALL, [.5])])
    self.assertEqual([line.gap for line in lines], [None, None])

  def test_paired(self):
    """Equal differences decide where the deviation over seeds does not."""
    lines = {line.measured.entry.name: line for line in standing.compare([
        measured('a', [.50, .60, .70]), measured('b', [.51, .61, .711]),
        measured('c', [.70, .50, .60])])}
    self.assertEqual(lines['b'].rank, 1)
    self.assertEqual(lines['b'].between, (1, 2))  # Better than a, c is open.
    self.assertEqual(lines['a'].between, (2, 3))
    self.assertEqual(lines['c'].between, (1, 3))

  def test_interval_is_students(self):
    """The 95 % point of 2 degrees of freedom is 4.303."""
    base = np.array([.5, .6, .7])
    unit = np.array([-1., 0., 1.])  # Deviation 1, error 1 / sqrt(3).
    for factor, rank in ((4.29, (1, 2)), (4.31, (1, 1))):
      better = base + .01 * (unit + factor / np.sqrt(3))
      lines = standing.compare([measured('a', better), measured('b', base)])
      self.assertEqual(lines[0].between, rank)

  def test_one_seed_decides_nothing(self):
    lines = standing.compare([measured('a', [.9]), measured('b', [.1])])
    self.assertEqual([line.between for line in lines], [(1, 2), (1, 2)])

  def test_broken_row_is_last(self):
    lines = standing.compare([measured('a', [np.nan, .9]),
                              measured('b', [.1, .1])])
    self.assertEqual([line.measured.entry.name for line in lines], ['b', 'a'])
    self.assertIn('| - |', page.table(lines)[-1])

  def test_broken_row_is_no_number(self):
    """Nor what is no JSON."""
    lines = standing.compare([
        measured(plan.FEW, [.1, .2]), measured(plan.ALL, [.9, .8]),
        measured('a', [np.nan, .9])])
    broken, = (line for line in lines if line.measured.entry.name == 'a')
    self.assertIsNone(broken.gap)
    text = records.written(BED, {'mild': lines}, {
        line.measured.entry.name: records.Record(
            {}, {0: -np.inf}, {'mild': line.measured}, {'mild': {}})
        for line in lines})
    self.assertIsNone(json.loads(text, parse_constant=self.fail)['rows'][
        'mild'][-1]['gap'])


class PictureTest(absltest.TestCase):
  """The picture of all rows."""

  def test_names_rows_and_skews_and_is_the_same_again(self):
    lines = {skew: standing.compare([
        measured(plan.FEW, [.5, .5]), measured(plan.ALL, [.9, .9]),
        measured('second', [.6, .7]), measured('first', [.7, .8])])
             for skew in ('mild', 'strong')}
    drawn = picture.svg(lines)
    assert drawn is not None
    for word in (b'>first<', b'>second<', b'>mild<', b'>strong<'):
      self.assertIn(word, drawn)
    self.assertNotIn(b'>labels_only<', drawn)  # A dashed line.
    self.assertEqual(drawn, picture.svg(lines))

  def test_a_row_far_below_moves_no_other(self):
    def places(*rows):
      drawn = picture.svg({'mild': standing.compare([
          measured(plan.FEW, [.6, .6]), measured(plan.ALL, [.9, .9]),
          measured('a', [.7, .8]), *rows])})
      assert drawn is not None
      # The x of the dashed line of labels only.
      return min(map(float, re.findall(
          rb'<path d="M ([\d.]+)[^"]*" [^>]*dasharray[^>]*>', drawn)))
    edge, lower = ([measured('b', [y, y])] for y in (.35, .0))
    self.assertAlmostEqual(places(*edge), places(*lower), delta=3)
    self.assertGreater(abs(places(*edge) - places()), 30)

  def test_bounds_that_diverged_leave_the_deviations(self):
    drawn = picture.svg({'mild': standing.compare([
        measured('a', [.7, .8]), *(measured(name, [np.nan, np.nan])
                                   for name in (plan.FEW, plan.ALL))])})
    self.assertRegex(drawn or b'', rb'd="M [^"]+L [^"]+" [^>]*width: 1.2')

  def test_nothing_to_draw(self):
    self.assertIsNone(picture.svg({'mild': standing.compare(
        [measured(plan.FEW, [.5, .5])])}))


class ReadTest(absltest.TestCase):
  """Numbers of rows and partitions."""

  def test_last_tenth(self):
    rows = [{'round': r, 'accuracy': r} for r in range(10, 101, 10)]
    self.assertEqual(standing.last_tenth(rows, 'accuracy'), 100)
    rows = [{'round': r, 'accuracy': r} for r in range(5, 101, 5)]
    self.assertEqual(standing.last_tenth(rows, 'accuracy'), 97.5)
    self.assertTrue(np.isnan(standing.last_tenth(
        [*rows[:-1], {'round': 100, 'accuracy': None}], 'accuracy')))

  def test_choose(self):
    first, second = (plan.Configuration(n, .1, {}) for n in range(2))
    self.assertEqual(standing.choose([(first, .5), (second, .5)]), first)
    self.assertEqual(standing.choose([(first, -np.inf), (second, .1)]), second)

  def test_worst_clients(self):
    """Of 20 clients two are the worst tenth."""
    mixes = np.tile([1., 0.], (20, 1))
    mixes[3], mixes[7] = [0, 1], [.5, .5]
    self.assertAlmostEqual(clients.worst(
        per_client.weighed(np.array([.9, .1]), mixes)), (.1 + .5) / 2)

  def test_the_worst_tenth_is_at_least_one_client(self):
    """Of 25 clients two: 2.5 is rounded to an even number."""
    self.assertEqual(clients.worst(np.arange(9.)), 0)
    self.assertEqual(clients.worst(np.arange(12.)), 0)
    self.assertEqual(clients.worst(np.arange(25.)), .5)

  def test_worst_reads_the_last_tenth(self):
    """Two clients, each of one class."""
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    file = run_files.partition(folder, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, labeled=np.array([0, 1]), unlabeled=np.array([-1, -1]),
             num_clients=2)
    recalls = {50: [0, 0], 90: [0, 0], 95: [.8, .3], 100: [.8, .5]}
    rows = [{'round': r, 'per_class_accuracy': x} for r, x in recalls.items()]
    self.assertAlmostEqual(
        standing._worst(folder, rows, 0, np.array([0, 1])), .4)

  def test_sent_is_the_mean_over_seeds(self):
    seeds: list[list[dict[str, Any]]] = [
        [{'up': 1}, {'up': 2}], [{'up': 5}, {'up': None}]]
    self.assertEqual(standing._sent(seeds, 'up'), 4)
    self.assertIsNone(standing._sent(seeds, 'down'))

  def test_client_rows(self):
    file = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory()), 'partition_0.npz')
    np.savez(file, labeled=np.array([0, -1, 2, -1, -1]),
             unlabeled=np.array([-1, 0, -1, 1, -1]), num_clients=[2])
    rows = standing.client_rows(file, np.array([0, 1, 1, 1, 0]), 2)
    # Row 2 is the server's, row 4 nobody's.
    np.testing.assert_array_equal(rows, [[1, 1], [0, 1]])
    with self.assertRaisesRegex(ValueError, 'deals 5 rows'):
      standing.client_rows(file, np.array([0, 1]), 2)


if __name__ == '__main__':
  absltest.main()
