// @ts-check
// A view that is moved and zoomed by pointer, wheel, buttons and keys; arrow keys lead from box to box.

/** @typedef {[number, number, number, number]} ViewBox left, top, width, height */

const ZOOM = 1.2;
const STEP = 40; // pixels of an arrow key
const DIRECTIONS = /** @type {Record<string, [number, number]>} */ (
  { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] });
const BOX = "g[role=button]";

/** Returns the part of a view that is seen after a zoom around a point, in its own coordinates.
 * @param {ViewBox} box @param {number} factor @param {number} x @param {number} y @returns {ViewBox} */
function zoomed([left, top, width, height], factor, x, y) {
  return [x - (x - left) * factor, y - (y - top) * factor, width * factor, height * factor];
}

/** Lets a view be moved and zoomed. The wheel zooms with Ctrl, as a pinch of a touchpad does: else it scrolls the page.
 * @param {HTMLElement} canvas */
function makeMovable(canvas) {
  const svg = /** @type {SVGSVGElement} */ (canvas.querySelector("svg"));
  const all = /** @type {ViewBox} */ ((svg.getAttribute("viewBox") ?? "").split(/[ ,]+/).map(Number));
  let box = all;
  const setViewBox = (/** @type {ViewBox} */ next) => {
    box = next;
    svg.setAttribute("viewBox", box.join(" "));
  };
  const zoom = (/** @type {number} */ factor) => setViewBox(zoomed(box, factor, box[0] + box[2] / 2, box[1] + box[3] / 2));
  const move = (/** @type {number} */ x, /** @type {number} */ y) => {
    const scale = Math.max(box[2] / svg.clientWidth, box[3] / svg.clientHeight);
    setViewBox([box[0] - x * scale, box[1] - y * scale, box[2], box[3]]);
  };
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM()?.inverse());
    setViewBox(zoomed(box, event.deltaY > 0 ? ZOOM : 1 / ZOOM, point.x, point.y));
  }, { passive: false });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons === 1 && event.pointerType !== "touch") move(event.movementX, event.movementY);
  });
  canvas.addEventListener("keydown", (event) => {
    const direction = DIRECTIONS[event.key];
    if (event.key === "+") zoom(1 / ZOOM);
    else if (event.key === "-") zoom(ZOOM);
    else if (event.key === "0") setViewBox(all);
    else if (direction && event.target === canvas) move(-STEP * direction[0], -STEP * direction[1]);
    else return;
    event.preventDefault();
  });
  for (const button of canvas.parentElement?.querySelectorAll("button[data-zoom]") ?? []) {
    const kind = /** @type {HTMLElement} */ (button).dataset.zoom;
    button.addEventListener("click", () => kind === "all" ? setViewBox(all) : zoom(kind === "in" ? 1 / ZOOM : ZOOM));
  }
}

/** Puts one box of a view into the tab order: left and right lead to the one before and after it, as they are drawn, up
 * and down to the nearest.
 * @param {HTMLElement} canvas */
function makeReachable(canvas) {
  const boxes = /** @type {SVGGElement[]} */ ([...canvas.querySelectorAll(BOX)]);
  boxes[0]?.setAttribute("tabindex", "0");
  canvas.addEventListener("focusin", (event) => {
    const box = event.target instanceof Element ? event.target.closest(BOX) : null;
    if (!box) return;
    canvas.querySelector(`${BOX}[tabindex="0"]`)?.setAttribute("tabindex", "-1");
    box.setAttribute("tabindex", "0");
  });
  canvas.addEventListener("keydown", (event) => {
    const box = /** @type {SVGGElement | null} */ (event.target instanceof Element ? event.target.closest(BOX) : null);
    const direction = DIRECTIONS[event.key];
    if (!box || !direction) return;
    event.preventDefault();
    const [x, y] = direction;
    (y ? nearest(boxes, box, y) : boxes[boxes.indexOf(box) + x])?.focus();
  });
}

/** Returns the nearest of some boxes below, or above where `down` is -1; rather straight ahead than aside.
 * @param {SVGGElement[]} boxes @param {Element} from @param {number} down */
function nearest(boxes, from, down) {
  const middle = (/** @type {Element} */ box) => {
    const { left, right, top, bottom } = box.getBoundingClientRect();
    return [(left + right) / 2, (top + bottom) / 2];
  };
  const [fromX, fromY] = middle(from);
  let best, least = Infinity;
  for (const box of boxes) {
    const [x, y] = middle(box), ahead = (y - fromY) * down, distance = ahead + 4 * Math.abs(x - fromX);
    if (ahead > 1 && distance < least) [best, least] = [box, distance];
  }
  return best;
}
