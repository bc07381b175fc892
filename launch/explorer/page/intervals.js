// Accuracies over groups of questions with 95 % intervals: Wilson's for one group, otherwise normal, for a mean of independent groups.

const Z = 1.959964;

export function wilson(p, n) {
  if (!n) return [0, 1];
  const centre = (p + (Z * Z) / (2 * n)) / (1 + (Z * Z) / n);
  const half = (Z / (1 + (Z * Z) / n)) * Math.sqrt((p * (1 - p)) / n + (Z * Z) / (4 * n * n));
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}

function groupSums(groups, count, columns) {
  const found = columns.map(() => new Float64Array(count));
  for (let i = 0; i < groups.length; i++) for (let c = 0; c < columns.length; c++) found[c][groups[i]] += columns[c](i);
  return found;
}

// Return the mean accuracy over the groups that occur.
export function accuracy(right, groups, count) {
  const [of, hits] = groupSums(groups, count, [() => 1, (i) => right[i]]);
  let sum = 0, spread = 0, some = 0;
  for (let g = 0; g < count; g++) {
    if (!of[g]) continue;
    const p = hits[g] / of[g];
    sum += p;
    spread += (p * (1 - p)) / of[g];
    some++;
  }
  const value = sum / some;
  const half = (Z * Math.sqrt(spread)) / some;
  const between = some === 1 ? wilson(value, right.length) : [Math.max(0, value - half), Math.min(1, value + half)];
  return { value, low: between[0], high: between[1] };
}

// Return the accuracy of the first answers minus that of the second, paired.
export function accuracyGain(first, second, groups, count) {
  const [of, sums, squares] = groupSums(groups, count, [
    () => 1, (i) => first[i] - second[i], (i) => (first[i] - second[i]) ** 2,
  ]);
  let sum = 0, spread = 0, some = 0;
  for (let g = 0; g < count; g++) {
    if (!of[g]) continue;
    const d = sums[g] / of[g];
    sum += d;
    spread += (squares[g] / of[g] - d * d) / of[g];
    some++;
  }
  const half = (Z * Math.sqrt(Math.max(0, spread))) / some;
  return { value: sum / some, low: sum / some - half, high: sum / some + half };
}

// Return half of the width of a mean's interval, from the influence of each cluster.
export function halfWidth(influence) {
  let squares = 0;
  for (const value of influence) squares += value * value;
  return (Z * Math.sqrt(squares)) / influence.length;
}
