data {
  batch ＝ 64
}
