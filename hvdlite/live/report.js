// Loads the page again while its job runs. The last page of a job is without this script.
"use strict";
{
  const SECONDS = 3;
  const { written, late } = document.documentElement.dataset;
  const key = `hvdlite ${location.pathname}`;
  const boxes = [document.documentElement, ...document.querySelectorAll(".scroll")];
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(key));
  } catch {} // A browser may forbid it.
  kept ||= { at: [] };

  // This computer's clock may differ from that of the job. It is asked for the time of a state only
  // until a newer one has come.
  if (kept.written && kept.written !== written) kept.came = Date.now();
  kept.written = written;
  boxes.forEach((box, i) => box.scrollTo(...(kept.at[i] || [0, 0])));
  history.scrollRestoration = "manual";

  const sayIfLate = () => {
    const age = (Date.now() - (kept.came || Number(written))) / 1000;
    if (age < Number(late)) return;
    const ago = age < 120 ? `${Math.round(age)} s` : `${Math.round(age / 60)} min`;
    const status = document.getElementById("status");
    status.className = "lost";
    status.textContent = `not written for ${ago}: the job has been killed, or cannot write this file; ${status.dataset.written}`;
  };
  const isRead = () => document.hidden || !getSelection().isCollapsed;
  sayIfLate();
  setInterval(() => (isRead() ? sayIfLate() : location.reload()), 1000 * SECONDS);
  addEventListener("pagehide", () => {
    kept.at = boxes.map((box) => [box.scrollLeft, box.scrollTop]);
    try {
      sessionStorage.setItem(key, JSON.stringify(kept));
    } catch {}
  });
}
