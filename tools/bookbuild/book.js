// Marks what is wider than the screen, so that book.css can say that it scrolls.

const WIDE =
  "main .checkbox-label, main .table-wrapper, main .display-math, main pre > code";

function mark(element) {
  const left = element.scrollWidth - element.clientWidth - element.scrollLeft;
  element.classList.toggle("scrolls", element.scrollWidth > element.clientWidth + 1);
  element.classList.toggle("goes-on", left > 1);
}

function markAll() {
  document.querySelectorAll(WIDE).forEach(mark);
}

for (const element of document.querySelectorAll(WIDE)) {
  element.addEventListener("scroll", () => mark(element), { passive: true });
}
addEventListener("load", markAll);
addEventListener("resize", markAll);
