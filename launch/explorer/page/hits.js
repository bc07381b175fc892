// Decisions from similarities (n, m): classes, retrieval in both directions, and votes of neighbours.

// Return for each of n images whether the first of the best classes is its label.
export function classificationHits(total, labels, classes) {
  const right = new Uint8Array(labels.length);
  for (let i = 0; i < labels.length; i++) {
    let best = 0;
    const row = i * classes;
    for (let c = 1; c < classes; c++) if (total[row + c] > total[row + best]) best = c;
    right[i] = best === labels[i] ? 1 : 0;
  }
  return right;
}

// Return 1 for questions whose comparisons are all positive, or zero where a tie counts as right.
export function questionHits(total, tie, comparisons) {
  return Uint8Array.from({ length: total.length / comparisons }, (_, question) => {
    for (let i = question * comparisons; i < (question + 1) * comparisons; i++) if (!(total[i] > 0 || (tie[i] && total[i] >= 0))) return 0;
    return 1;
  });
}

// Return hits within k: (I,) for images, (T,) for texts. Among equal similarities, the lower number is first.
export function retrievalHits(total, owner, images, k, size) {
  const texts = owner.length;
  const own = new Float64Array(texts), ahead = new Int32Array(texts);
  for (let j = 0; j < texts; j++) own[j] = total[owner[j] * texts + j] * size[owner[j]];
  const best = new Int32Array(images).fill(-1); // the first of each image's texts
  for (let j = 0; j < texts; j++) {
    const row = owner[j] * texts, held = best[owner[j]];
    if (held < 0 || total[row + j] > total[row + held]) best[owner[j]] = j;
  }
  const texted = new Uint8Array(images);
  for (let i = 0; i < images; i++) {
    const row = i * texts, mine = best[i], mark = mine < 0 ? 0 : total[row + mine], by = size[i];
    let before = 0;
    for (let j = 0; j < texts; j++) {
      const value = total[row + j];
      if (mine >= 0 && (value > mark || (value === mark && j < mine))) before++;
      const scaled = value * by;
      if (scaled > own[j] || (scaled === own[j] && i < owner[j])) ahead[j]++;
    }
    texted[i] = mine >= 0 && before < k ? 1 : 0;
  }
  return { texted, pictured: Uint8Array.from(ahead, (count) => (count < k ? 1 : 0)) };
}

// Return for each of n images whether the class with most weight among its k nearest neighbours is its label.
// groups: {own, bank}, numbers of groups whose members do not vote for each other; undefined if all vote.
export function knnHits(total, labels, bank, facts, sizes, groups) {
  const { k, temperature, classes } = facts;
  const m = bank.length, right = new Uint8Array(labels.length);
  const near = new Float64Array(k), row = new Int32Array(k), votes = new Float64Array(classes);
  const weights = new Float64Array(classes).fill(1);
  if (facts.balanced) {
    weights.fill(0);
    for (let j = 0; j < m; j++) weights[bank[j]]++;
    for (let c = 0; c < classes; c++) weights[c] = 1 / Math.max(weights[c], 1);
  }
  for (let i = 0; i < labels.length; i++) {
    let filled = 0;
    for (let j = 0; j < m; j++) {
      if (groups !== undefined && groups.own[i] === groups.bank[j]) continue;
      const value = total[i * m + j] * sizes.left[i] * sizes.right[j];
      if (filled === k && value <= near[k - 1]) continue;
      let place = filled < k ? filled++ : k - 1;
      while (place > 0 && near[place - 1] < value) {
        near[place] = near[place - 1];
        row[place] = row[place - 1];
        place--;
      }
      near[place] = value;
      row[place] = j;
    }
    votes.fill(0);
    // Relative to the nearest, because exp() of a cosine over a small temperature is infinite.
    for (let r = 0; r < filled; r++) votes[bank[row[r]]] += Math.exp((near[r] - near[0]) / temperature) * weights[bank[row[r]]];
    let best = 0;
    for (let c = 1; c < classes; c++) if (votes[c] > votes[best]) best = c;
    right[i] = best === labels[i] ? 1 : 0;
  }
  return right;
}
